"use strict";
// An address that ends in the name of a row opens it, whatever is filtered out.
(() => {
  function reach() {
    const row = document.getElementById(location.hash.slice(1));
    if (!row || !row.matches("details.entry")) return;
    const all = row.closest(".ledger").querySelector(".tally input[value=all]");
    if (!row.checkVisibility()) all.checked = true;
    row.open = true;
    row.scrollIntoView({ behavior: "instant" });
  }
  addEventListener("hashchange", reach);
  reach();
  document.documentElement.dataset.ledger = "ready";
})();
