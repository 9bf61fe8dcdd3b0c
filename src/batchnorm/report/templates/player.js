"use strict";
// The film: play, chapters, keys and the address. It shows what is in its data and nothing else.
(() => {
  const SECONDS = 18, CALM_FRAMES_A_SECOND = 2;
  const players = [];

  function player(root, number) {
    const film = data(root.id), last = film.steps.length - 1;
    const find = (selector) => root.querySelector(selector);
    const range = find("input[type=range]"), button = find(".play"), speed = find(".speed select"), link = find(".link");
    const said = find(".said"), where = find(".where"), caption = find(".caption"), tip = find(".tip");
    const chapters = [...root.querySelectorAll(".chapters button")];
    const key = number ? `step${number + 1}` : "step";
    let at = 0, playing = false, fresh = true, before = 0, clock = 0, saying = 0;

    const atTime = (time) => film.times.reduce((best, each, frame) =>
      Math.abs(each - time) < Math.abs(film.times[best] - time) ? frame : best, 0);
    const atStep = (step) => film.steps.reduce((best, each, frame) =>
      Math.abs(each - step) < Math.abs(film.steps[best] - step) ? frame : best, 0);

    function hint(event, lines) {
      tip.hidden = !lines || !lines.length;
      if (tip.hidden) return;
      tip.replaceChildren(...lines.map((line) => element("span", {}, line)));
      const box = root.getBoundingClientRect(), half = tip.offsetWidth / 2;
      tip.style.left = `${Math.min(Math.max(event.clientX - box.left, half), box.width - half)}px`;
      tip.style.top = `${event.clientY - box.top}px`;
    }
    const showBars = histograms.draw(film, find(".networks"), hint);
    const showLosses = losses.draw(film, find(".losses"), (time) => { stop(); go(atTime(time)); });

    const current = () => film.chapters.findLastIndex((chapter) => chapter.start <= at);
    function words() {
      const shares = film.networks.map((network, index) => {
        const given = film.cells[index][network.stages.length - 1];
        const flat = given.map((cell) => cell.saturation && cell.saturation[at]).filter((share) => typeof share === "number");
        return flat.length ? `${network.name || "this run"}, in the flat ends, layer by layer: ${flat.map(histograms.percent).join(", ")}.` : "";
      });
      return [film.captions[at], ...shares].join(" ").trim();
    }
    function go(to) {
      at = Math.min(Math.max(to, 0), last);
      fresh = false;
      const step = film.steps[at], chapter = current();
      clock = film.times[at];
      range.value = Math.round(1000 * clock);
      range.setAttribute("aria-valuetext", `step ${step} of ${film.steps[last]}`);
      where.textContent = `step ${step} of ${film.steps[last]}`;
      root.dataset.step = step;
      root.dataset.stage = chapter < 0 || film.chapters[chapter].stage === null ? "all" : film.chapters[chapter].stage || "given";
      caption.textContent = film.captions[at];
      chapters.forEach((each, index) => {
        if (index === chapter) each.setAttribute("aria-current", "step");
        else each.removeAttribute("aria-current");
      });
      showBars(at);
      showLosses(at);
      settle();
    }
    // A reader hears, and the address shows, where one stops, not every step on the way.
    function settle() {
      clearTimeout(saying);
      if (playing) return;
      saying = setTimeout(() => {
        said.textContent = words();
        if (!fresh) history.replaceState(null, "", `#${key}=${film.steps[at]}`);
      }, 200);
    }
    function face() {
      const name = playing ? "Pause" : at === last && last > 0 ? "Replay" : "Play";
      button.setAttribute("aria-label", name);
      button.title = name;
      button.querySelector("path").setAttribute("d", playing ? "M6 4.5h4v15H6zM14 4.5h4v15h-4z" : "M7 4.5v15l13-7.5z");
      root.classList.toggle("playing", playing);
    }
    function stop() {
      playing = false;
      face();
      settle();
    }
    function play() {
      playing = true;
      if (fresh || at === last) go(0);
      before = performance.now();
      face();
      requestAnimationFrame(tock);
    }
    function tock(now) {
      if (!playing) return;
      const seconds = Math.max(now - before, 0) / 1000;
      if (calm.matches && seconds < 1 / (CALM_FRAMES_A_SECOND * Number(speed.value))) return requestAnimationFrame(tock);
      before = now;
      const time = Math.min(clock + (seconds * Number(speed.value)) / SECONDS, 1);
      const frame = film.times.findLastIndex((each) => each <= time + 1e-9);
      if (frame > at) go(frame);
      clock = time;
      if (at === last) stop();
      else requestAnimationFrame(tock);
    }
    const toggle = () => (playing ? stop() : play());
    const jump = (frame) => { stop(); go(frame); face(); };

    const steps = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
    const within = { ArrowUp: 1, ArrowDown: -1, PageUp: 10, PageDown: -10 }; // elsewhere these scroll the page
    function press(event) {
      const inside = root.contains(event.target), { key: name } = event;
      if (name === " ") {
        if (event.target.closest?.("button, summary, a, input[type=checkbox], input[type=radio]")) return;
        toggle();
      } else if (name in steps) jump(at + steps[name]);
      else if (inside && name in within) jump(at + within[name]);
      else if (chapters[Number(name) - 1]) jump(Number(chapters[Number(name) - 1].dataset.frame));
      else return;
      event.preventDefault();
    }
    function read(address) {
      const asked = new URLSearchParams(new URL(address).hash.slice(1)).get(key);
      if (asked === null || !/^\d+$/.test(asked)) return false;
      jump(atStep(Number(asked)));
      return true;
    }
    button.addEventListener("click", toggle);
    range.addEventListener("input", () => jump(atTime(range.value / 1000)));
    chapters.forEach((each) => each.addEventListener("click", () => jump(Number(each.dataset.frame))));
    link.addEventListener("click", async () => {
      history.replaceState(null, "", `#${key}=${film.steps[at]}`);
      try {
        await navigator.clipboard.writeText(location.href);
        link.textContent = "✓";
      } catch {
        link.textContent = "#";
      }
      setTimeout(() => { link.textContent = "link"; }, 1500);
    });
    addEventListener("hashchange", (event) => read(event.newURL)); // the address may be ours again by now
    if (!read(location.href)) {
      go(film.opening);
      fresh = true;
    } else if (root.getBoundingClientRect().bottom > innerHeight) root.scrollIntoView({ behavior: "instant" });
    face();
    return { root, press };
  }

  // Keys belong to the film that is visible, wherever the focus is; of several, to the one that has the focus or most room.
  function shown(root) {
    const box = root.getBoundingClientRect();
    return Math.max(Math.min(box.bottom, innerHeight) - Math.max(box.top, 0), 0);
  }
  addEventListener("keydown", (event) => {
    const typed = "input:not([type=range], [type=checkbox], [type=radio]), select, textarea, [contenteditable]";
    if (event.ctrlKey || event.altKey || event.metaKey || event.target.closest?.(typed) || event.defaultPrevented) return;
    const own = players.find((each) => each.root.contains(event.target));
    const most = players.reduce((best, each) => (shown(each.root) > shown(best.root) ? each : best), players[0]);
    const chosen = own || (most && shown(most.root) > 80 ? most : null);
    if (chosen) chosen.press(event);
  });

  document.querySelectorAll(".film").forEach((root, number) => players.push(player(root, number)));
  performance.mark("player drawn");
})();
