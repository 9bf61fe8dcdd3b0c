"use strict";
// The film's loss curves: one line for each network over the film's own time, logarithmic where all losses are above 0.
const losses = (() => {
  const HIGH = 118, BASE = HIGH - 18;

  function written(value) {
    if (value === null || value === undefined) return "–";
    return value >= 100 ? value.toFixed(0) : value >= 0.01 || value === 0 ? value.toPrecision(2) : value >= 1e-4 ? value.toPrecision(1) : value.toExponential(0).replace("-", "−");
  }

  // The place in the film of a step that may lie between two frames.
  function timeOf(film, step) {
    const next = film.steps.findIndex((each) => each >= step);
    if (next <= 0) return next < 0 ? 1 : 0;
    const [from, to] = [film.steps[next - 1], film.steps[next]];
    return film.times[next - 1] + ((film.times[next] - film.times[next - 1]) * (step - from)) / (to - from);
  }

  // Draw the curves; returns the function that moves the cursor to a frame.
  function draw(film, place, seek) {
    if (!film.losses.length) {
      place.remove();
      return () => {};
    }
    const known = film.losses.flatMap((line) => line.values).filter((value) => value !== null);
    const log = known.length > 0 && Math.min(...known) > 0;
    const scale = log ? Math.log10 : (value) => value;
    let low = log ? Math.floor(scale(Math.min(...known)) + 0.3) : Math.min(0, ...known), high = scale(Math.max(...known, log ? 0 : 1));
    high += 0.04 * (high - low) || 1;
    const svg = shape("svg", { class: "curves" });
    place.append(svg);
    let move = () => {}, now = 0;

    function layout() {
      const style = getComputedStyle(place), left = parseFloat(style.getPropertyValue("--left")), right = parseFloat(style.getPropertyValue("--right"));
      const TOP = narrow.matches ? 24 : 8; // where there is no room beside the curves, the names stand above them
      const wide = place.clientWidth, inner = wide - left - right;
      const x = (time) => left + inner * time, y = (value) => BASE - ((BASE - TOP) * (Math.max(scale(value), low) - low)) / (high - low);
      svg.setAttribute("viewBox", `0 0 ${wide} ${HIGH}`);
      svg.style.height = `${HIGH}px`;
      svg.replaceChildren();
      const levels = [];
      if (log) {
        const stride = Math.max(1, Math.ceil((high - low) / 4));
        for (let power = low; power <= high; power += stride) levels.push([10 ** power, power < 0 ? (10 ** power).toFixed(Math.min(-power, 6)) : String(10 ** power)]);
      } else for (const share of [0, 0.5, 1]) levels.push([low + share * (high - low), written(low + share * (high - low))]);
      for (const [value, text] of levels) {
        svg.append(shape("line", { class: "grid", x1: left, x2: wide - right, y1: y(value), y2: y(value) }));
        svg.append(shape("text", { class: "level", x: left - 6, y: y(value) + 4, "text-anchor": "end" }, text));
      }
      svg.append(shape("text", { class: "name", x: left + 6, y: narrow.matches ? 10 : TOP + 6 }, narrow.matches ? "loss" : log ? "training loss (log)" : "training loss"));
      let free = -Infinity;
      const last = film.steps[film.steps.length - 1], first = film.steps[0];
      const ticks = [first, ...[1, 2, 3, 4, 5, 6].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** (power - 1))).filter((step) => step > first && step < last)];
      const end = x(1) - 26;
      for (const step of ticks) {
        const at = x(timeOf(film, step)), text = step === first ? `step ${step}` : String(step);
        if (at < free || at > end) continue;
        svg.append(shape("text", { x: at, y: HIGH - 4, "text-anchor": step === first ? "start" : "middle" }, text));
        free = at + 30 + (step === first ? 14 : 0);
      }
      svg.append(shape("text", { x: x(1), y: HIGH - 4, "text-anchor": "end" }, String(last)));
      for (const line of film.losses) {
        let path = "", pen = "M";
        line.values.forEach((value, index) => {
          if (value === null) pen = "M";
          else (path += `${pen}${x(timeOf(film, line.steps[index])).toFixed(1)},${y(value).toFixed(1)}`), (pen = "L");
        });
        const drawn = shape("path", { class: "curve", d: path });
        drawn.style.setProperty("--own", `var(--${film.networks[line.network].color})`);
        svg.append(drawn);
      }
      const cursor = shape("line", { class: "cursor", y1: TOP, y2: BASE });
      svg.append(cursor);
      const followers = film.losses.map((line) => {
        const dot = shape("circle", { class: "dot", r: 4 }), name = shape("text", { class: "who" });
        const color = film.networks[line.network].color;
        dot.style.setProperty("--own", `var(--${color})`);
        name.style.setProperty("--own-ink", `var(--${color}-ink)`);
        svg.append(dot, name);
        return { line, dot, name };
      });
      move = (frame) => {
        now = frame;
        const at = x(film.times[frame]), step = film.steps[frame];
        cursor.setAttribute("x1", at);
        cursor.setAttribute("x2", at);
        const places = followers.map(({ line, dot, name }) => {
          let index = line.steps.findIndex((each) => each > step);
          index = (index < 0 ? line.steps.length : index) - 1;
          const value = index < 0 ? null : line.values[index];
          dot.setAttribute("cx", at);
          dot.setAttribute("cy", value === null ? -20 : y(value));
          name.textContent = `${film.networks[line.network].name || "this run"} ${written(value)}`;
          return { name, y: value === null ? BASE : y(value) };
        }).sort((one, other) => one.y - other.y);
        places.forEach((each, index) => { // names do not lie over one another, nor below the chart
          each.y = Math.min(Math.max(each.y + 4, index ? places[index - 1].y + 17 : TOP + 6), BASE + 4 - 17 * (places.length - 1 - index));
          each.name.setAttribute("x", narrow.matches ? wide - right - 118 * index : wide - right + 12);
          each.name.setAttribute("y", narrow.matches ? 10 : each.y);
        });
      };
      const drag = (event) => {
        if (event.type === "pointerdown") svg.setPointerCapture(event.pointerId);
        if (event.type === "pointerdown" || event.buttons) seek((event.clientX - svg.getBoundingClientRect().left - left) / inner);
      };
      svg.onpointerdown = svg.onpointermove = drag;
      move(now);
    }
    new ResizeObserver(layout).observe(place);
    return (frame) => { now = frame; move(frame); };
  }
  return { draw };
})();
