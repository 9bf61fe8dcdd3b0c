"use strict";
// The signal player: histograms of every layer at every recorded step. It draws what is in its data and nothing else.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const WIDE = 240, HIGH = 72, FRAMES_A_SECOND = 12, CALM_FRAMES_A_SECOND = 3;

  function element(name, attributes = {}, text = "") {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== "") made.textContent = text; // never innerHTML: names are shown as they are
    return made;
  }
  function shape(name, attributes, text = "") {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== "") made.textContent = text;
    return made;
  }
  function written(value) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    const text = size >= 1000 ? value.toPrecision(3) : size < 0.005 ? "0.00" : value.toFixed(2);
    return text.replace("-", "−");
  }
  const percent = (share) => (share === null || share === undefined ? "–" : `${(100 * share).toFixed(0)}%`);
  const tick = (value) => String(Number(value.toPrecision(3))).replace("-", "−");

  // ---- one histogram

  function outline(bins, axis) {
    if (!bins) return "";
    const [low, high, under, over, counts] = bins;
    const width = (high - low) / counts.length, top = Math.max(...counts, 1);
    const x = (value) => (WIDE * (Math.min(Math.max(value, axis.low), axis.high) - axis.low)) / (axis.high - axis.low);
    const bar = (from, to, count) => `M${from.toFixed(1)},${HIGH}V${(HIGH - (HIGH - 4) * Math.min(count / top, 1)).toFixed(1)}H${to.toFixed(1)}V${HIGH}Z`;
    let path = "", left = under, right = over;
    counts.forEach((count, index) => {
      const from = low + index * width, to = from + width, middle = (from + to) / 2;
      if (middle < axis.low) left += count;
      else if (middle > axis.high) right += count;
      else if (count) path += bar(x(from), x(to), count);
    });
    if (left) path += bar(0, 3, left);
    if (right) path += bar(WIDE - 3, WIDE, right);
    return path;
  }

  function panel(column, axis, ends) {
    const box = element("div", { class: "panel" });
    const svg = shape("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, preserveAspectRatio: "none", "aria-hidden": "true" });
    const x = (value) => (WIDE * (value - axis.low)) / (axis.high - axis.low);
    if (ends && column.stage === "" && axis.high > ends) {
      svg.append(shape("rect", { class: "end", x: 0, y: 0, width: x(-ends), height: HIGH }));
      svg.append(shape("rect", { class: "end", x: x(ends), y: 0, width: WIDE - x(ends), height: HIGH }));
    }
    svg.append(shape("line", { class: "zero", x1: x(0), x2: x(0), y1: 0, y2: HIGH }));
    const bars = shape("path", { class: "bars", d: "" });
    const mean = shape("line", { class: "mean", y1: 0, y2: HIGH });
    svg.append(bars, mean);
    const marks = element("p", { class: "axis", "aria-hidden": "true" });
    for (const value of [axis.low, axis.low / 2, 0, axis.high / 2, axis.high]) {
      const mark = element("span", {}, tick(value));
      mark.style.left = `${(100 * x(value)) / WIDE}%`;
      marks.append(mark);
    }
    const numbers = element("p", { class: "numbers" });
    box.style.setProperty("--own", `var(--${column.colour})`);
    box.append(svg, marks, numbers);
    return { box, bars, mean, numbers, x, axis };
  }

  // Of a step that a stack has no record of, the one before is shown.
  const latest = (values, at) => {
    if (!values) return null;
    while (at > 0 && values[at] === null) at -= 1;
    return values[at];
  };

  function show(panel, cell, at) {
    const mean = latest(cell.mean, at), variance = latest(cell.variance, at);
    panel.bars.setAttribute("d", outline(latest(cell.bins, at), panel.axis));
    const place = mean === null ? -9 : Math.min(Math.max(panel.x(mean), 0.5), WIDE - 0.5);
    panel.mean.setAttribute("x1", place);
    panel.mean.setAttribute("x2", place);
    const told = [["mean", written(mean)], ["var", written(variance)]];
    if (cell.saturation) told.push(["flat", percent(latest(cell.saturation, at))]);
    if (cell.dead) told.push(["dead", percent(latest(cell.dead, at))]);
    for (const [name, sign] of [["gamma", "γ"], ["beta", "β"]]) {
      const value = latest(cell[name], at);
      if (value) told.push([sign, `${written(value[1])} to ${written(value[2])}`]);
    }
    panel.numbers.replaceChildren(...told.map(([name, value]) => {
      const pair = element("span", { "data-what": name }, `${name} `);
      pair.append(element("b", {}, value));
      return pair;
    }));
  }

  // ---- the curves below

  function chart(place, quantity, lines, signal, seek) {
    const share = quantity.includes("accuracy");
    const box = element("figure", { class: "curve", "aria-label": share ? "Validation accuracy" : "Training loss" });
    const head = element("figcaption", {}, share ? "Validation accuracy" : "Training loss");
    const keys = lines.map((line) => {
      const key = element("span", { class: "key" });
      key.style.setProperty("--own", `var(--${line.colour})`);
      const value = element("b");
      key.append(element("i", { "aria-hidden": "true" }), `${line.stack || "this run"} `, value);
      head.append(key);
      return value;
    });
    const svg = shape("svg", { "aria-hidden": "true" });
    box.append(head, svg);
    place.append(box);
    const all = lines.flatMap((line) => line.values).filter((value) => value !== null);
    const top = share ? 1 : Math.max(...all, 0.1) * 1.05;
    const last = Math.max(signal.last, ...lines.flatMap((line) => line.steps.slice(-1)));
    let scale = null, cursor = null, dots = [], now = 0;

    function layout() {
      const wide = box.clientWidth, high = 170, left = 44, right = 12, base = high - 26;
      svg.setAttribute("viewBox", `0 0 ${wide} ${high}`);
      svg.style.height = `${high}px`;
      const x = (step) => left + ((wide - left - right) * step) / Math.max(last, 1);
      const y = (value) => base - ((base - 8) * value) / top;
      svg.replaceChildren();
      const step = share ? 0.25 : [0.1, 0.2, 0.5, 1, 2, 5, 10, 50].find((size) => top / size <= 5) || top / 4;
      for (let value = 0; value <= top + 1e-9; value += step) {
        svg.append(shape("line", { class: "grid", x1: left, x2: wide - right, y1: y(value), y2: y(value) }));
        svg.append(shape("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, share ? `${Math.round(100 * value)}%` : tick(value)));
      }
      const stride = [1, 2, 5, 10, 20, 50, 100, 200, 500].map((size) => size * Math.max(1, 10 ** (Math.ceil(Math.log10(last + 1)) - 3))).find((size) => last / size <= 6.5) || last;
      for (let at = 0; at <= last; at += stride) {
        if (at > 0 && x(at) - x(0) < 62) continue; // "step 0" stands there
        const anchor = at === 0 ? "start" : "middle";
        svg.append(shape("text", { x: x(at), y: high - 8, "text-anchor": anchor }, at === 0 ? "step 0" : String(at)));
      }
      for (const [number, line] of lines.entries()) {
        let path = "", pen = "M";
        line.values.forEach((value, index) => {
          if (value === null) pen = "M";
          else (path += `${pen}${x(line.steps[index]).toFixed(1)},${y(Math.min(value, top)).toFixed(1)}`), (pen = "L");
        });
        const drawn = shape("path", { class: `line number-${number}`, d: path });
        drawn.style.setProperty("--own", `var(--${line.colour})`);
        svg.append(drawn);
      }
      cursor = shape("line", { class: "cursor", y1: 4, y2: base });
      svg.append(cursor);
      dots = lines.map((line) => {
        const dot = shape("circle", { class: "dot", r: 4.5 });
        dot.style.setProperty("--own", `var(--${line.colour})`);
        svg.append(dot);
        return dot;
      });
      scale = { x, y, step: (px) => ((px - left) / (wide - left - right)) * last };
      move(now);
    }
    function move(step) {
      now = step;
      if (!scale) return;
      cursor.setAttribute("x1", scale.x(step));
      cursor.setAttribute("x2", scale.x(step));
      lines.forEach((line, number) => {
        let index = line.steps.findIndex((each) => each > step);
        index = (index < 0 ? line.steps.length : index) - 1;
        const value = index < 0 ? null : line.values[index];
        keys[number].textContent = share && value !== null ? `${(100 * value).toFixed(1)}%` : written(value);
        dots[number].setAttribute("cx", scale.x(index < 0 ? 0 : line.steps[index]));
        dots[number].setAttribute("cy", value === null ? -20 : scale.y(Math.min(value, top)));
      });
    }
    const drag = (event) => {
      if (event.type === "pointerdown") svg.setPointerCapture(event.pointerId);
      if (event.type === "pointerdown" || event.buttons) seek(scale.step(event.clientX - svg.getBoundingClientRect().left));
    };
    svg.addEventListener("pointerdown", drag);
    svg.addEventListener("pointermove", drag);
    new ResizeObserver(layout).observe(box);
    return move;
  }

  // ---- the whole

  function player(root) {
    const signal = data(root.id), last = signal.steps.length - 1;
    const find = (selector) => root.querySelector(selector);
    const range = find("input[type=range]"), button = find(".play"), speed = find(".speed select");
    const grid = find(".stage-grid"), said = find(".said"), where = find(".where"), stages = find(".stages");
    let at = 0, playing = false, before = 0, owed = 0, saying = 0;
    range.max = last;

    // Columns that are stages of one stack take turns where there is no room for all.
    const staged = signal.columns.map((column, index) => index).filter((index) =>
      signal.columns.filter((other) => other.stack === signal.columns[index].stack).length > 1);
    grid.style.setProperty("--columns", signal.columns.length);
    grid.style.setProperty("--few", signal.columns.length - Math.max(staged.length - 1, 0));
    const tops = signal.columns.map((column) => {
      const top = element("div", { class: "column" });
      top.style.setProperty("--own", `var(--${column.colour})`);
      top.append(element("h3", {}, column.title), element("p", {}, column.detail));
      return top;
    });
    grid.append(element("span", { class: "corner" }), ...tops);
    const panels = signal.layers.map((layer, row) => {
      grid.append(element("h4", {}, layer.name));
      return signal.columns.map((column, index) => {
        const made = panel(column, layer, signal.cells[index][row].saturation ? signal.ends : null);
        grid.append(made.box);
        return made;
      });
    });
    function turn(chosen) {
      for (const index of staged) {
        for (const box of [tops[index], ...panels.map((row) => row[index].box)]) box.classList.toggle("off", index !== chosen);
      }
    }
    if (staged.length) {
      for (const index of staged) {
        const label = element("label"), radio = element("input", { type: "radio", name: `${root.id}-stage`, value: index });
        radio.checked = index === staged[staged.length - 1];
        radio.addEventListener("change", () => turn(index));
        label.append(radio, ` ${signal.columns[index].title.replace(/^With BN: /, "")}`);
        stages.append(label);
      }
      turn(staged[staged.length - 1]);
    } else stages.remove();

    if (!signal.ends) find(".flat-ends").remove();
    const quantities = [...new Set(signal.curves.map((curve) => curve.quantity))];
    const movers = quantities.map((quantity) => chart(find(".curves"), quantity, signal.curves.filter((curve) => curve.quantity === quantity), signal,
      (step) => { pause(); go(nearest(step)); }));
    const nearest = (step) => signal.steps.reduce((best, each, index) =>
      Math.abs(each - step) < Math.abs(signal.steps[best] - step) ? index : best, 0);

    function words() {
      const step = signal.steps[at], row = signal.layers.length - 1;
      const parts = [`Step ${step} of ${signal.last}.`];
      signal.columns.forEach((column, index) => {
        if (column.stage) return;
        const cell = signal.cells[index][row], flat = latest(cell.saturation, at);
        parts.push(`${column.stack || "This run"}: ${signal.layers[row].name} has mean ${written(latest(cell.mean, at))}, ` +
          `variance ${written(latest(cell.variance, at))}` + (flat === null ? "." : `, ${percent(flat)} of it in the flat ends.`));
      });
      return parts.join(" ");
    }
    function go(to) {
      at = Math.min(Math.max(to, 0), last);
      const step = signal.steps[at];
      range.value = at;
      range.setAttribute("aria-valuetext", `step ${step} of ${signal.last}`);
      where.textContent = `step ${step}`;
      root.dataset.step = step;
      panels.forEach((row, layer) => row.forEach((each, index) => show(each, signal.cells[index][layer], at)));
      movers.forEach((move) => move(step));
      clearTimeout(saying); // a reader hears where one stops, not every step on the way
      if (!playing) saying = setTimeout(() => { said.textContent = words(); }, 250);
    }
    function face() {
      const name = playing ? "Pause" : at === last && last > 0 ? "Replay" : "Play";
      button.setAttribute("aria-label", name);
      button.lastElementChild.textContent = name;
      button.querySelector("path").setAttribute("d", playing ? "M6 4.5h4v15H6zM14 4.5h4v15h-4z" : "M7 4.5v15l13-7.5z");
      root.classList.toggle("playing", playing);
    }
    function pause() {
      playing = false;
      face();
    }
    function play() {
      if (at === last) go(0);
      playing = true;
      before = performance.now();
      owed = 0;
      face();
      requestAnimationFrame(tock);
    }
    function tock(time) {
      if (!playing) return;
      owed += ((time - before) / 1000) * (calm.matches ? CALM_FRAMES_A_SECOND : FRAMES_A_SECOND) * Number(speed.value);
      before = time;
      const whole = Math.floor(owed);
      owed -= whole;
      if (at + whole >= last) playing = false;
      if (whole) go(at + whole);
      if (playing) requestAnimationFrame(tock);
      else face();
    }
    const keys = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 10, PageDown: -10, Home: -Infinity, End: Infinity };
    button.addEventListener("click", () => (playing ? pause() : play()));
    range.addEventListener("input", () => { pause(); go(Number(range.value)); face(); });
    root.addEventListener("keydown", (event) => {
      if (event.target.matches("select, input[type=radio]") || event.ctrlKey || event.altKey || event.metaKey) return;
      if (event.key === " " && event.target !== button) {
        event.preventDefault();
        if (playing) pause(); else play();
      } else if (event.key in keys) {
        event.preventDefault();
        pause();
        go(at + keys[event.key]);
        face();
      }
    });
    go(0);
    face();
  }

  document.querySelectorAll(".signal").forEach(player);
  performance.mark("player drawn");
})();
