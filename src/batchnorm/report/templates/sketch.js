"use strict";
// A chart as plain SVG, drawn at once from the figure that plotly would draw: lines with diamonds, and heat maps.
// Plotly's script is long to read; until someone reaches for a chart, this is the chart, and on paper always. The names
// at the ends of lines, and the band of the line under the pointer, are drawn here also when plotly draws the lines.
const sketch = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const DASHES = { dash: [3, 3], dot: [1, 1], dashdot: [3, 1, 1, 1], longdash: [5, 5] };
  const own = (colour) => `var(--${colour})`; // by name: the mode can change, and paper has its own
  const plain = (text) => String(text).replaceAll("&lt;", "<").replaceAll("&gt;", ">").replaceAll("&amp;", "&");
  const pen = document.createElement("canvas").getContext("2d"), family = getComputedStyle(document.body).fontFamily;

  function shape(name, attributes, text) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) if (value !== undefined) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text; // never innerHTML: names are shown as they are
    return made;
  }
  function wide(texts, size) {
    pen.font = `${size}px ${family}`;
    return Math.max(0, ...texts.map((text) => pen.measureText(text).width));
  }
  const written = (value, format) =>
    (format === ".0%" ? `${Math.round(100 * value)}%` : String(Number(value.toPrecision(4)))).replace("-", "−");

  // ---- axes: a place for every value, and the values to write at

  function nice(low, high, most) {
    const rough = (high - low) / Math.max(most, 1), power = 10 ** Math.floor(Math.log10(rough || 1));
    const step = [1, 2, 2.5, 5, 10].map((size) => size * power).find((size) => size >= rough * 0.999);
    const ticks = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n += 1) ticks.push(n * step);
    return ticks;
  }
  // The edges of cells: half way between values, and as far beyond the first and the last.
  function edges(values) {
    const inner = values.slice(1).map((value, index) => (value + values[index]) / 2), last = values.length - 1;
    if (!inner.length) return [values[0] - 0.5, values[0] + 0.5];
    return [2 * values[0] - inner[0], ...inner, 2 * values[last] - inner[last - 1]];
  }
  function axis(layout, values, cells) {
    const named = layout.type === "category" || values.some((value) => typeof value === "string");
    if (named) return { names: values.map(plain), range: [-0.5, values.length - 0.5], at: (_, index) => index, edges: edges(values.map((_, index) => index)) };
    const log = layout.type === "log", at = (value) => (log ? Math.log10(value) : value);
    let range = layout.range;
    const found = (cells ? edges(values) : values).filter((value) => value !== null).map(at);
    if (!range) {
      const low = found.length ? Math.min(...found) : 0, high = found.length ? Math.max(...found) : 1;
      const room = cells ? 0 : low === high ? 1 : layout.room * (high - low);
      range = [low - room, high + room];
    }
    return { at, range, edges: cells ? edges(values) : null, ticks: layout.tickvals && layout.tickvals.map((value) => [at(value), String(value)]) };
  }

  // ---- colours of a heat map

  const parsed = (colour) => [1, 3, 5].map((from) => parseInt(colour.slice(from, from + 2), 16));
  function painter(trace) {
    const stops = trace.colorscale.map(([share, colour]) => [share, parsed(colour)]);
    const all = trace.z.flat().filter((value) => value !== null);
    let low = trace.zmin ?? Math.min(...all), high = trace.zmax ?? Math.max(...all);
    if (trace.zmid !== undefined) {
      const reach = Math.max(high - trace.zmid, trace.zmid - low);
      [low, high] = [trace.zmid - reach, trace.zmid + reach];
    }
    if (!(high > low)) [low, high] = [low - 0.5, low + 0.5];
    const paint = (value) => {
      const share = Math.min(Math.max((value - low) / (high - low), 0), 1);
      const next = Math.max(1, stops.findIndex(([end]) => end >= share)), [from, a] = stops[next - 1], [to, b] = stops[next];
      return a.map((part, index) => Math.round(part + ((share - from) / (to - from)) * (b[index] - part)));
    };
    return { low, high, paint, stops };
  }

  // ---- one chart

  const INSIDE = 40; // pixels from a line within which the pointer is on it
  return function sketch(element, figure, { W, H, narrow }) {
    const size = narrow ? 11 : 13;
    const { data: traces, layout } = figure, heat = traces.find((trace) => trace.type === "heatmap");
    const lines = heat ? [] : traces.filter((trace) => trace.meta.part === "line");
    const gather = (side) => traces.flatMap((trace) => (trace.meta.part === "band" ? [] : trace[side]));
    const levels = (layout.shapes || []).map(({ y0 }) => y0);
    const x = axis({ room: 0, ...layout.xaxis }, heat ? heat.x : gather("x"), heat);
    const y = axis({ room: 0.06, ...layout.yaxis }, heat ? heat.y : [...gather("y"), ...levels], heat);
    const titles = [layout.xaxis, layout.yaxis].map((side) => side && side.title && plain(side.title.text));
    const format = (layout.yaxis || {}).tickformat;
    y.ticks ||= y.names ? y.names.map((name, index) => [index, name]) : nice(...y.range, H / 70).map((value) => [value, written(value, format)]);
    const scaled = heat && painter(heat), upright = heat && !narrow; // the scale of colours: beside the map, or above it
    const bar = upright && nice(scaled.low, scaled.high, 5).map((value) => [value, written(value, heat.colorbar.tickformat)]);
    const left = Math.ceil(wide(y.ticks.map(([, text]) => text), size)) + 12;
    const head = upright ? size + 16 : heat || titles[1] ? size + 20 : 12;
    // Names stand behind the ends of lines, long ones above them.
    const ends = lines.map((trace) => ({ trace, text: plain(trace.name), last: trace.y.findLastIndex((value) => value !== null) })).filter(({ text, last }) => text && last >= 0);
    const beyond = ({ text }) => text.length <= (narrow ? 14 : 26);
    const aside = Math.max(wide(ends.filter(beyond).map(({ text }) => text), size) * 1.1 + 14, narrow ? 10 : 24);
    const right = upright ? Math.max(wide(bar.map(([, text]) => text), size) + 42, wide([plain(heat.colorbar.title.text)], size) + 14) : heat ? (narrow ? 10 : 24) : aside;
    // Names that do not fit below their columns are written upwards.
    const longest = x.names ? wide(x.names, size) : 0, turned = longest + 6 > (W - right - left) / (x.names || []).length;
    const below = turned ? longest + 6 : size;
    const box = { left, right: W - right, top: head, bottom: H - (titles[0] ? below + 1.2 * size + 22 : below + 16) };
    const across = (value) => box.left + ((value - x.range[0]) / (x.range[1] - x.range[0])) * (box.right - box.left);
    const part = (value) => (value - y.range[0]) / (y.range[1] - y.range[0]);
    const falls = (layout.yaxis || {}).autorange === "reversed";
    const down = (value) => (falls ? box.top + part(value) * (box.bottom - box.top) : box.bottom - part(value) * (box.bottom - box.top));
    x.ticks ||= x.names ? x.names.map((name, index) => [index, name]) : nice(...x.range, (box.right - box.left) / (narrow ? 50 : 90)).map((value) => [value, written(value)]);
    const svg = shape("svg", { class: "sketch", viewBox: `0 0 ${W} ${H}`, "font-size": size, "aria-hidden": "true" });
    const put = (name, attributes, text) => svg.appendChild(shape(name, attributes, text));

    // Names that would stand on each other are left out evenly.
    const thin = (ticks, room) => ticks.filter((_, index) => index % Math.max(1, Math.ceil(room)) === 0);
    const apart = turned ? size * 1.15 : wide(x.ticks.map(([, text]) => text), size) + (x.names ? 2 : 8);
    const under = thin(x.ticks, apart / ((box.right - box.left) / x.ticks.length));
    const beside = thin(y.ticks, (size * 1.15) / ((box.bottom - box.top) / y.ticks.length));
    for (const [value, text] of under) {
      const at = across(value).toFixed(1);
      if (!heat) put("line", { class: "grid", x1: at, x2: at, y1: box.top, y2: box.bottom });
      if (turned) put("text", { class: "xtick", transform: `translate(${across(value) + size * 0.35} ${box.bottom + 6}) rotate(-90)`, "text-anchor": "end" }, text);
      else put("text", { class: "xtick", x: at, y: box.bottom + size + 6, "text-anchor": "middle" }, text);
    }
    for (const [value, text] of beside) {
      const at = down(value);
      if (!heat) put("line", { class: "grid", x1: box.left, x2: box.right, y1: at.toFixed(1), y2: at.toFixed(1) });
      put("text", { class: "ytick", x: box.left - 6, y: (at + size * 0.35).toFixed(1), "text-anchor": "end" }, text);
    }
    if (titles[0]) put("text", { x: (box.left + box.right) / 2, y: H - 8, "text-anchor": "middle" }, titles[0]);

    function map(trace) {
      const small = narrow ? 9 : size, fits = wide((trace.text || []).flat(), small) < across(x.edges[1]) - across(x.edges[0]); // if not, the table has them
      const { paint } = scaled, cells = new Map(), texts = [], [gapX, gapY] = [(trace.xgap || 0) / 2, (trace.ygap || 0) / 2];
      trace.z.forEach((row, r) => row.forEach((value, c) => {
        if (value === null) return;
        const colour = paint(value), [x0, x1] = [across(x.edges[c]) + gapX, across(x.edges[c + 1]) - gapX], [y0, y1] = [down(y.edges[r]) + gapY, down(y.edges[r + 1]) - gapY];
        cells.set(String(colour), `${cells.get(String(colour)) || ""}M${x0.toFixed(1)},${y0.toFixed(1)}H${x1.toFixed(1)}V${y1.toFixed(1)}H${x0.toFixed(1)}Z`);
        if (fits && trace.texttemplate && trace.text[r][c]) texts.push([(x0 + x1) / 2, (y0 + y1) / 2, trace.text[r][c], colour]);
      }));
      for (const [colour, d] of cells) put("path", { class: "cells", d, fill: `rgb(${colour})` });
      for (const [cx, cy, text, [red, green, blue]] of texts) put("text", { x: cx.toFixed(1), y: (cy + small * 0.35).toFixed(1), "text-anchor": "middle", "font-size": small, style: `fill: ${0.299 * red + 0.587 * green + 0.114 * blue > 140 ? "#15191e" : "#ffffff"}` }, text);
    }
    function scale() {
      const id = `${element.id}-scale`, from = box.right + 14, tall = box.bottom - box.top, title = plain(heat.colorbar.title.text);
      const fill = shape("linearGradient", { id, x1: 0, x2: upright ? 0 : 1, y1: upright ? 1 : 0, y2: 0 });
      for (const [offset, colour] of scaled.stops) fill.append(shape("stop", { offset, "stop-color": `rgb(${colour})` }));
      svg.append(fill);
      if (!upright) {
        put("rect", { x: box.left, y: size + 4, width: box.right - box.left, height: 8, fill: `url(#${id})` });
        const said = [[box.left, "start", scaled.low], [box.right, "end", scaled.high]];
        for (const [at, anchor, value] of said) put("text", { x: at, y: size, "text-anchor": anchor }, written(Number(value.toPrecision(3)), heat.colorbar.tickformat));
        put("text", { x: (box.left + box.right) / 2, y: size, "text-anchor": "middle" }, title);
        return;
      }
      put("rect", { x: from, y: box.top, width: 12, height: tall, fill: `url(#${id})` });
      for (const [value, text] of bar) put("text", { x: from + 18, y: (box.bottom - (tall * (value - scaled.low)) / (scaled.high - scaled.low) + size * 0.35).toFixed(1) }, text);
      put("text", { x: from, y: box.top - 12 }, title);
    }
    const over = shape("g", { class: "over" });
    function line(trace, index) {
      const { colour, part: kind } = trace.meta;
      const point = (index) => `${across(x.at(trace.x[index])).toFixed(1)},${down(y.at(trace.y[index])).toFixed(1)}`;
      if (kind === "diamond") return trace.x.forEach((_, index) => {
        put("path", { class: "diamond", transform: `translate(${point(index)})`, d: "M0,-7L7,0L0,7L-7,0Z", style: `fill: ${own(colour)}` });
      });
      let d = "", mark = "M";
      trace.y.forEach((value, index) => {
        if (value === null) mark = "M";
        else (d += mark + point(index)), (mark = "L");
      });
      if (kind === "band") { // of the line that follows
        const inside = `clip-path: inset(${box.top}px ${W - box.right}px ${H - box.bottom}px ${box.left}px) view-box; fill: ${own(colour)}`;
        return over.append(shape("path", { class: "band", "data-line": lines.indexOf(traces[index + 1]), d: `${d}Z`, opacity: trace.opacity, style: inside }));
      }
      const dash = DASHES[trace.line.dash], number = lines.indexOf(trace);
      put("path", { class: "line", "data-line": number, "data-name": plain(trace.name), d, "stroke-width": trace.line.width, "stroke-dasharray": dash && dash.map((times) => 3 * times), style: `stroke: ${own(colour)}` });
      if (trace.mode.includes("markers")) trace.x.forEach((_, index) => {
        const [cx, cy] = point(index).split(","), open = (trace.marker.symbol || [])[index] === "circle-open";
        put("circle", { class: "dot", cx, cy, r: trace.marker.size / 2, style: `stroke: ${own(colour)}; fill: ${open ? "var(--card)" : own(colour)}` });
      });
    }
    // Names behind the ends of their lines, from the top down, none on another.
    function names() {
      const tall = size + 3, at = (end) => down(y.at(end.trace.y[end.last])), least = Math.max(box.top, tall);
      const sorted = ends.map((end) => ({ ...end, wish: at(end), aside: beyond(end) })).sort((a, b) => a.wish - b.wish);
      for (const group of [true, false]) {
        const own = sorted.filter(({ aside }) => aside === group);
        let lowest = -Infinity;
        for (const end of own) lowest = end.y = Math.max(group ? end.wish + size * 0.35 : end.wish - 6, lowest + tall, least);
        let room = box.bottom;
        for (const end of own.reverse()) room = (end.y = Math.min(end.y, room)) - tall;
      }
      for (const { trace, text, y: place, aside: outside } of sorted) {
        const ink = `var(--${trace.meta.colour}-ink, var(--${trace.meta.colour}))`;
        over.append(shape("text", { class: "name", "data-line": lines.indexOf(trace), x: outside ? box.right + 8 : box.right - 4, y: place.toFixed(1), "text-anchor": outside ? "start" : "end", style: `fill: ${ink}` }, text));
      }
      if (titles[1]) over.append(shape("text", { class: "ytitle", x: 2, y: size }, titles[1]));
    }
    // The number of the line that is nearest to a place, above or below it; -1 if none is near.
    function nearest(px, py) {
      const away = lines.map((trace) => {
        const places = trace.x.map((value, index) => [across(x.at(value)), trace.y[index] === null ? NaN : down(y.at(trace.y[index]))]);
        const next = places.findIndex(([place]) => place >= px), [x1, y1] = places[next] || [], [x0, y0] = places[next - 1] || places[next] || [];
        return Math.abs(py - (x1 > x0 ? y0 + ((px - x0) / (x1 - x0)) * (y1 - y0) : y1));
      });
      const least = Math.min(...away.filter((distance) => distance <= INSIDE));
      return away.indexOf(least);
    }
    if (heat) map(heat);
    else traces.forEach(line);
    if (heat) scale();
    for (const { y0, line: look } of layout.shapes || []) {
      put("line", { class: "level", x1: box.left, x2: box.right, y1: down(y0), y2: down(y0), "stroke-width": look.width, "stroke-dasharray": "3" });
    }
    names();
    svg.append(over);
    element.querySelectorAll(".sketch, .wait").forEach((old) => old.remove());
    element.prepend(svg);
    return { box, ranges: [x.range, y.range], nearest };
  };
})();
