"use strict";
// What the other scripts share: the data beside an element, and the palette as it is in this mode.
const data = (id) => JSON.parse(document.querySelector(`script[data-for="${id}"]`).textContent);
const styled = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const dark = matchMedia("(prefers-color-scheme: dark)");
const calm = matchMedia("(prefers-reduced-motion: reduce)");
const narrow = matchMedia("(max-width: 640px)");

for (const contents of document.querySelectorAll(".contents details")) { // at the side there is room for all of it
  const side = matchMedia("(min-width: 1180px)"), fit = () => { contents.open = side.matches; };
  side.addEventListener("change", fit);
  fit();
}

function element(name, attributes = {}, text = "") {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== "") made.textContent = text; // never innerHTML: names are shown as they are
  return made;
}
function shape(name, attributes = {}, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== "") made.textContent = text;
  return made;
}
