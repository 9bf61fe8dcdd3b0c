"use strict";
// The charts: sketches at once, and plotly's own chart in the place of one that is pointed at. Plotly's script
// stays text until then: reading it takes longer than everything else on the page.
(() => {
  const DWELL = 120; // milliseconds that a mouse rests on a chart, not passing over it
  const shown = new Map(); // which of its figures each chart shows
  const live = new Set(); // the charts that plotly draws

  function themed(figure, { box, ranges }, { W, H }) {
    const ink = styled("text"), grid = styled("line"), face = "rgba(0,0,0,0)";
    const font = { family: getComputedStyle(document.body).fontFamily, color: ink, size: narrow.matches ? 11 : 13 };
    const kept = figure.data.filter((trace) => !trace.meta || trace.meta.part !== "band"); // the sketch draws bands
    const traces = structuredClone(kept).map((trace) => {
      const colour = trace.meta && trace.meta.colour ? styled(trace.meta.colour) : null;
      if (colour && trace.meta.part === "diamond") trace.marker = { ...trace.marker, color: colour, line: { color: styled("card"), width: 1.5 } };
      else if (colour) trace.line = { ...trace.line, color: colour };
      if (colour && trace.marker) trace.marker.color = colour;
      if (trace.type === "heatmap" && narrow.matches) {
        trace.colorbar = { ...trace.colorbar, orientation: "h", thickness: 8, y: 1, yanchor: "bottom", nticks: 4 };
        if (trace.texttemplate) trace.textfont = { size: 9 };
      }
      return trace;
    });
    const layout = structuredClone(figure.layout);
    const axis = { gridcolor: grid, zerolinecolor: grid, linecolor: grid, tickcolor: grid, fixedrange: narrow.matches };
    layout.xaxis = { ...axis, ...layout.xaxis, automargin: true };
    layout.yaxis = { ...axis, ...layout.yaxis, automargin: true };
    if (traces.some((trace) => trace.type === "heatmap")) layout.xaxis.showgrid = layout.yaxis.showgrid = false;
    for (const side of ["xaxis", "yaxis"]) if (layout[side].title) layout[side].title.font = { size: font.size };
    let margin = { l: narrow.matches ? 44 : 64, r: narrow.matches ? 8 : 24, t: 12, b: 48 };
    if (!traces.some((trace) => trace.type === "heatmap")) { // in the place of the sketch, whose names stay
      margin = { l: box.left, r: W - box.right, t: box.top, b: H - box.bottom };
      layout.xaxis = { ...layout.xaxis, automargin: false, range: [...ranges[0]] };
      layout.yaxis = { ...layout.yaxis, automargin: false, range: [...ranges[1]], title: { text: "" } };
      Object.assign(layout, { hovermode: "closest", hoverdistance: -1, showlegend: false });
    }
    for (const shape of layout.shapes || []) shape.line = { ...shape.line, color: ink };
    Object.assign(layout, {
      font, paper_bgcolor: face, plot_bgcolor: face, dragmode: narrow.matches ? false : "zoom",
      margin,
      hoverlabel: { bgcolor: styled("card"), bordercolor: grid, font: { ...font } },
    });
    return [traces, layout];
  }

  const options = { responsive: true, displayModeBar: false }; // a toolbar would stand on the data: drag to zoom, twice to reset
  const figureOf = (element) => data(element.id)[shown.get(element.id) || 0];

  const room = (element) => ({ W: element.clientWidth || 640, H: element.clientHeight });
  const sketches = new Map(); // where each is drawn
  function draw(element, size = room(element)) {
    const figure = figureOf(element);
    sketches.set(element, sketch(element, figure, { ...size, narrow: narrow.matches })); // of a live chart, too: names, and paper
    element.classList.remove("zoomed");
    if (!element.dataset.live) return null;
    return Plotly.react(element, ...themed(figure, sketches.get(element), size), options);
  }
  function point(element, event) { // the line under the pointer has its band
    const { left, top } = element.getBoundingClientRect();
    const near = event ? sketches.get(element).nearest(event.clientX - left, event.clientY - top) : -1;
    for (const each of element.querySelectorAll(".sketch [data-line]")) each.classList.toggle("near", Number(each.dataset.line) === near);
  }

  const painted = () => new Promise((next) => requestAnimationFrame(() => setTimeout(next)));
  function read() {
    if (window.Plotly) return;
    performance.mark("plotly asked for");
    const script = document.createElement("script");
    script.textContent = document.getElementById("plotly-source").textContent;
    document.head.append(script);
    performance.mark("plotly read");
  }
  async function enliven(element) {
    if (live.has(element)) return;
    live.add(element);
    element.classList.add("reading");
    if (document.readyState === "loading") await new Promise((next) => addEventListener("DOMContentLoaded", next, { once: true }));
    await painted(); // the cursor says that it is coming
    read();
    element.dataset.live = "yes";
    await draw(element);
    element.on("plotly_relayout", () => { // names and bands are those of the whole
      const now = [element.layout.xaxis, element.layout.yaxis].map((axis) => axis.range), all = sketches.get(element).ranges;
      element.classList.toggle("zoomed", now.flat().some((end, index) => Math.abs(end - all.flat()[index]) > 1e-9));
    });
    element.classList.remove("reading");
    performance.mark("chart live");
  }

  const all = () => [...document.querySelectorAll(".plotly-figure")];
  const shut = (element) => element.closest("details:not([open])"); // drawn when it is opened
  const sizes = new Map(); // of the charts that are drawn
  function begin(element) {
    let resting = 0;
    draw(element, sizes.get(element));
    element.addEventListener("pointermove", (event) => {
      point(element, event);
      if (event.pointerType === "mouse") resting ||= setTimeout(enliven, DWELL, element);
    });
    element.addEventListener("pointerleave", () => { clearTimeout(resting); resting = 0; point(element); });
    element.addEventListener("click", () => enliven(element)); // a finger that taps; one that scrolls does not
    new ResizeObserver(() => refit(element)).observe(element);
  }
  const seen = all().filter((element) => !shut(element));
  for (const element of seen) sizes.set(element, room(element)); // all before the first is drawn: one layout
  for (const element of all()) {
    if (sizes.has(element)) begin(element);
    else shut(element).addEventListener("toggle", () => { sizes.set(element, room(element)); begin(element); }, { once: true });
  }
  function refit(element) {
    const size = room(element), { W, H } = sizes.get(element);
    sizes.set(element, size);
    if (size.W !== W || size.H !== H) draw(element, size);
  }

  document.addEventListener("change", (event) => {
    const menu = event.target.closest(".choose select");
    if (!menu) return;
    shown.set(menu.dataset.of, Number(menu.value));
    draw(document.getElementById(menu.dataset.of));
  });
  const again = () => sizes.forEach((_, element) => draw(element));
  dark.addEventListener("change", again);
  narrow.addEventListener("change", again);
  performance.mark("charts drawn");
  document.documentElement.dataset.charts = "drawn";
})();
