"use strict";
// What the other scripts share: the data beside an element, and the palette as it is in this mode.
const data = (id) => JSON.parse(document.querySelector(`script[data-for="${id}"]`).textContent);
const styled = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const dark = matchMedia("(prefers-color-scheme: dark)");
const calm = matchMedia("(prefers-reduced-motion: reduce)");
const narrow = matchMedia("(max-width: 640px)");
