"use strict";
// The charts. Plotly's script is kept as text until the page has been painted: reading it takes a moment, and nothing
// above needs it.
(() => {
  const shown = new Map(); // which of its figures each chart shows

  function themed(figure) {
    const ink = styled("text"), grid = styled("line"), face = "rgba(0,0,0,0)";
    const font = { family: getComputedStyle(document.body).fontFamily, color: ink, size: narrow.matches ? 11 : 13 };
    const traces = structuredClone(figure.data).map((trace) => {
      const colour = trace.meta && trace.meta.colour ? styled(trace.meta.colour) : null;
      if (colour && trace.meta.part === "band") trace.fillcolor = colour;
      else if (colour && trace.meta.part === "diamond") trace.marker = { ...trace.marker, color: colour, line: { color: styled("card"), width: 1.5 } };
      else if (colour) trace.line = { ...trace.line, color: colour };
      if (trace.type === "heatmap" && narrow.matches) {
        trace.showscale = false;
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
    for (const shape of layout.shapes || []) shape.line = { ...shape.line, color: ink };
    Object.assign(layout, {
      font, paper_bgcolor: face, plot_bgcolor: face, dragmode: narrow.matches ? false : "zoom",
      margin: { l: narrow.matches ? 44 : 64, r: narrow.matches ? 8 : 24, t: 12, b: 48 },
      hoverlabel: { bgcolor: styled("card"), bordercolor: grid, font: { ...font } },
    });
    return [traces, layout];
  }

  function draw(element) {
    const figures = data(element.id);
    const [traces, layout] = themed(figures[shown.get(element.id) || 0]);
    document.querySelectorAll(`.switches[data-of="${element.id}"] input`).forEach((box) => {
      for (const index of box.dataset.traces.split(",")) traces[index].visible = box.checked;
    });
    element.querySelectorAll(".wait").forEach((note) => note.remove());
    const options = { responsive: true, displaylogo: false, displayModeBar: narrow.matches ? false : "hover", modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };
    return Plotly.react(element, traces, layout, options);
  }

  const all = () => [...document.querySelectorAll(".plotly-figure")];
  async function start() {
    const script = document.createElement("script");
    script.textContent = document.getElementById("plotly-source").textContent;
    document.head.append(script);
    performance.mark("plotly read");
    for (const element of all()) {
      await draw(element);
      if (element === all()[0]) performance.mark("first chart drawn");
      await new Promise((next) => setTimeout(next)); // let the page answer between two charts
    }
    performance.mark("all charts drawn");
    document.documentElement.dataset.charts = "drawn";
  }

  document.addEventListener("change", (event) => {
    const box = event.target.closest(".switches input");
    const menu = event.target.closest(".choose select");
    if (box) {
      const element = document.getElementById(box.closest(".switches").dataset.of);
      if (window.Plotly) Plotly.restyle(element, { visible: box.checked }, box.dataset.traces.split(",").map(Number));
    }
    if (menu) {
      shown.set(menu.dataset.of, Number(menu.value));
      if (window.Plotly) draw(document.getElementById(menu.dataset.of));
    }
  });
  const again = () => window.Plotly && all().forEach(draw);
  dark.addEventListener("change", again);
  narrow.addEventListener("change", again);
  requestAnimationFrame(() => setTimeout(start));
})();
