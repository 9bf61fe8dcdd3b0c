"use strict";
// The film's histograms: a block for each network, a row for each layer, the stages of a layer over one another.
const histograms = (() => {
  const WIDE = 240, HIGH = 72, ROOM = 4;
  const STAGES = { "before BN": "arrives", normalised: "normalized", "": "given" };

  const percent = (share) => (share === null || share === undefined ? "" : `${(100 * share).toFixed(0)}%`);
  const tick = (value) => String(Number(value.toPrecision(2))).replace("-", "−");
  function written(value) {
    const size = Math.abs(value);
    const text = size >= 100 ? value.toFixed(0) : size < 0.005 ? "0.00" : value.toFixed(2);
    return text.replace("-", "−");
  }

  // The counts within the axis; what lies beyond it is counted at its ends.
  function within([low, high, under, over, counts], axis) {
    const width = (high - low) / counts.length, kept = [];
    let left = under, right = over;
    counts.forEach((count, index) => {
      const from = low + index * width, to = from + width, middle = (from + to) / 2;
      if (middle < axis.low) left += count;
      else if (middle > axis.high) right += count;
      else kept.push({ from: Math.max(from, axis.low), to: Math.min(to, axis.high), count });
    });
    if (kept.length) {
      kept[0].count += left;
      kept[kept.length - 1].count += right;
    }
    return kept;
  }

  function outline(bins, axis) {
    if (!bins) return "";
    const kept = within(bins, axis), top = Math.max(1, ...kept.map((bin) => bin.count));
    const x = (value) => ((WIDE * (value - axis.low)) / (axis.high - axis.low)).toFixed(1);
    let path = "", pen = false;
    for (const { from, to, count } of kept) {
      if (count) {
        path += `${pen ? "" : `M${x(from)},${HIGH}`}V${(HIGH - ((HIGH - ROOM) * count) / top).toFixed(1)}H${x(to)}`;
        pen = true;
      } else if (pen) {
        path += `V${HIGH}`;
        pen = false;
      }
    }
    return pen ? `${path}V${HIGH}` : path;
  }

  // What a tooltip says of the values under the mouse.
  function reading(share, axis, stages, cells, frame) {
    const at = axis.low + share * (axis.high - axis.low), lines = [];
    stages.forEach((stage, number) => {
      const cell = cells[number], bins = cell.bins && cell.bins[frame];
      if (!bins) return;
      const all = within(bins, axis), bin = all.find((each) => at < each.to) || all[all.length - 1];
      const total = bins[2] + bins[3] + bins[4].reduce((sum, count) => sum + count, 0);
      if (!lines.length) {
        const beyond = bin === all[0] && bins[2] ? "up to " : bin === all[all.length - 1] && bins[3] ? "from " : "";
        lines.push(beyond ? `${beyond}${tick(beyond === "from " ? bin.from : bin.to)}` : `${tick(bin.from)} to ${tick(bin.to)}`);
      }
      const name = stages.length > 1 ? `${STAGES[stage]}: ` : "";
      const numbers = [["mean", cell.mean], ["variance", cell.variance]].filter(([, values]) => values && values[frame] !== null);
      lines.push(`${name}${bin.count} of ${total}` + numbers.map(([word, values]) => `, ${word} ${written(values[frame])}`).join(""));
    });
    const given = cells[cells.length - 1], learned = [];
    for (const [name, sign] of [["gamma", "γ"], ["beta", "β"]]) {
      const value = given[name] && given[name][frame];
      if (value) learned.push(`${sign} ${written(value[1])} to ${written(value[2])}`);
    }
    if (learned.length) lines.push(learned.join(", "));
    if (given.dead && given.dead[frame] !== null) lines.push(`${percent(given.dead[frame])} of its units are dead`);
    return lines;
  }

  function row(film, network, layer, cells, tip) {
    const axis = film.layers[layer], own = film.networks[network];
    const box = element("div", { class: "layer" });
    const svg = shape("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, preserveAspectRatio: "none", "aria-hidden": "true" });
    const x = (value) => (WIDE * (value - axis.low)) / (axis.high - axis.low);
    const flat = cells[cells.length - 1].saturation, ends = film.ends;
    if (ends && flat && axis.high > ends) {
      svg.append(shape("rect", { class: "end", x: 0, y: 0, width: x(-ends), height: HIGH }));
      svg.append(shape("rect", { class: "end", x: x(ends), y: 0, width: WIDE - x(ends), height: HIGH }));
    }
    svg.append(shape("line", { class: "zero", x1: x(0), x2: x(0), y1: 0, y2: HIGH }));
    const paths = own.stages.map((stage) => {
      const path = shape("path", { class: `bars ${STAGES[stage]}` });
      svg.append(path);
      return path;
    });
    const share = element("p", { class: "share" }), value = element("b");
    share.append(value);
    if (flat) share.append(element("span", { class: "unseen" }, ` of ${axis.name} ${own.name} lies in the flat ends`));
    box.append(element("h4", { title: axis.name }, axis.label), svg, share);
    if (!film.one_axis) box.append(marks(axis, null));
    let now = 0;
    svg.addEventListener("pointermove", (event) => {
      const place = svg.getBoundingClientRect();
      tip(event, reading((event.clientX - place.left) / place.width, axis, own.stages, cells, now));
    });
    svg.addEventListener("pointerleave", () => tip());
    const show = (frame) => {
      now = frame;
      paths.forEach((path, stage) => path.setAttribute("d", outline(cells[stage].bins && cells[stage].bins[frame], axis)));
      value.textContent = flat ? percent(flat[frame]) : "";
      box.classList.toggle("lost", Boolean(flat) && flat[frame] >= 0.2);
    };
    return { box, show };
  }

  function marks(axis, ends) {
    const line = element("p", { class: "axis", "aria-hidden": "true" });
    for (const value of ends && axis.high > ends ? [axis.low, -ends, 0, ends, axis.high] : [axis.low, 0, axis.high]) {
      const mark = element("span", {}, tick(value));
      mark.style.left = `${(100 * (value - axis.low)) / (axis.high - axis.low)}%`;
      line.append(mark);
    }
    return line;
  }

  // Draw the blocks; returns the function that shows a frame.
  function draw(film, place, tip) {
    const rows = film.networks.flatMap((network, number) => {
      const block = element("section", { class: "network", "aria-label": network.name || "this run" });
      block.style.setProperty("--own", `var(--${network.color})`);
      block.style.setProperty("--own-ink", `var(--${network.color}-ink)`);
      const head = element("h3", {}, network.name || "this run");
      if (network.stages.length > 1) {
        const words = element("small");
        network.stages.forEach((stage, index) => {
          const text = { "before BN": "what arrives", normalised: "normalized", "": "after γ and β" }[stage];
          words.append(index ? " → " : "", element("span", { class: STAGES[stage] }, text));
        });
        head.append(" ", words);
      } else if (film.activation) head.append(" ", element("small", {}, `what each ${film.activation} is given`));
      if (film.cells[number].some((stage) => stage.some((cell) => cell.saturation))) head.append(element("i", { "aria-hidden": "true" }, "flat"));
      block.append(head);
      const made = film.layers.map((axis, layer) => row(film, number, layer, film.cells[number].map((stage) => stage[layer]), tip));
      block.append(...made.map((each) => each.box));
      if (film.one_axis) block.append(marks(film.layers[0], film.ends));
      place.append(block);
      return made;
    });
    return (frame) => rows.forEach((each) => each.show(frame));
  }

  return { draw, percent, written };
})();
