"use strict";
// A chart shows what is alive at the moment under the pointer, or at the one that the arrow keys have moved to, and
// enlarges a part of the step: dragged over, or around that moment by the buttons and the keys + and -.
const size = (count) => {
  for (const [unit, bytes] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (Math.abs(count) >= bytes) return (count / bytes).toFixed(Math.abs(count) < 100 * bytes ? 2 : 1) + " " + unit;
  return count + " B";
};
const row = (into, name, value, color) => {
  const line = document.createElement("div"), left = document.createElement("span"), right = document.createElement("span");
  if (color) {
    const swatch = document.createElement("i");
    swatch.className = "swatch";
    swatch.style.background = `var(--${color})`;
    left.append(swatch);
  }
  left.append(name);
  right.append(value);
  line.append(left, right);
  into.append(line);
};
const clamped = (value, least, most) => Math.max(least, Math.min(most, value));
const LEAST = 8; // moments: fewer are not enlarged
const NAMED = 60; // pixels: a phase that has fewer is not named
const DRAGGED = 6; // pixels: less is a click
const OUTSIDE = "(the step itself)"; // of any module

for (const plot of document.querySelectorAll(".plot")) {
  const step = JSON.parse(document.getElementById(plot.dataset.of).textContent);
  const count = step.ticks.length, names = Object.keys(step.category_bytes).reverse();
  const part = (name) => plot.querySelector("." + name);
  const tip = part("tip"), cursor = part("cursor"), mark = part("mark"), selected = part("selected");
  const drawing = plot.querySelector("svg"), phases = plot.nextElementSibling.children;
  const zoom = document.querySelector(`.zoom[data-of="${plot.dataset.of}"]`);
  const ends = step.phases.slice(1).map((one) => one[1]).concat(count);
  let at = step.marked, from = 0, to = count, pressed = null;
  const share = (moment) => (moment - from) / (to - from);
  const phase = (index) => step.phases.reduce((found, one) => (one[1] <= index ? one[0] : found), "");
  const module = (index) => step.modules[index] || OUTSIDE;
  const show = (index) => {
    at = clamped(index, 0, count - 1);
    if (at < from || at >= to) view(clamped(at - (to - from) / 2, 0, count - (to - from)), to - from);
    const x = share(at + 0.5), alive = names.filter((name) => step.category_bytes[name][at]);
    const total = size(names.reduce((sum, name) => sum + step.category_bytes[name][at], 0)) + " in the " + phase(at);
    const largest = (step.largest_modules[at] || []).map(([index, bytes]) => [module(index), size(bytes)]);
    cursor.hidden = tip.hidden = false;
    cursor.style.left = 100 * x + "%";
    tip.replaceChildren();
    const title = document.createElement("b");
    title.append(total);
    tip.append(title);
    for (const name of alive) row(tip, name.replaceAll("_", " "), size(step.category_bytes[name][at]), name);
    if (largest.length) tip.append(document.createElement("hr"));
    for (const [name, bytes] of largest) row(tip, name, bytes);
    tip.append(document.createElement("hr"));
    const last = document.createElement("p");
    last.append(`${step.operators[step.operator_at[at]]} in ${module(step.module_at[at])}`);
    tip.append(last);
    const width = plot.clientWidth, beside = x < 0.5 ? x * width + 10 : x * width - 10 - tip.offsetWidth;
    tip.style.left = Math.max(-plot.offsetLeft / 2, Math.min(beside, width - tip.offsetWidth)) + "px";
    const said = alive.map((name) => `${name.replaceAll("_", " ")} ${size(step.category_bytes[name][at])}`);
    const modules = largest.map(([name, bytes]) => `${name} ${bytes}`);
    plot.setAttribute("aria-valuenow", at + 1);
    plot.setAttribute("aria-valuetext", [total, ...said, "largest modules: " + (modules.join(", ") || "none")].join("; "));
  };
  const hide = () => { cursor.hidden = tip.hidden = true; };
  const view = (begin, length) => {
    length = clamped(Math.round(length), Math.min(LEAST, count), count);
    from = clamped(Math.round(begin), 0, count - length);
    to = from + length;
    drawing.setAttribute("viewBox", `${from} 0 ${length} 1000`);
    const x = share(step.marked + 0.5);
    mark.hidden = x < 0 || x > 1;
    mark.style.left = 100 * x + "%";
    mark.classList.toggle("left", x > 0.5);
    step.phases.forEach(([name, first], index) => {
      const shown = Math.max(0, Math.min(to, ends[index]) - Math.max(from, first));
      phases[index].style.flex = `${shown} 0 0`;
      phases[index].hidden = !shown;
      phases[index].textContent = (shown / length) * plot.clientWidth >= NAMED ? name : "";
    });
    if (!tip.hidden) at >= from && at < to ? show(at) : hide();
  };
  const enlarge = (by) => {
    if (!by) return view(0, count);
    const length = clamped((to - from) * by, LEAST, count), around = at >= from && at < to ? share(at + 0.5) : 0.5;
    view(at + 0.5 - around * length, length);
  };
  const moment = (event) => {
    const box = plot.getBoundingClientRect();
    return clamped(from + Math.floor(((event.clientX - box.left) / box.width) * (to - from)), from, to - 1);
  };
  plot.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    pressed = { x: event.clientX, at: moment(event) };
    plot.setPointerCapture(event.pointerId);
  });
  plot.addEventListener("pointermove", (event) => {
    show(moment(event));
    selected.hidden = !pressed || Math.abs(event.clientX - pressed.x) < DRAGGED;
    if (selected.hidden) return;
    const [first, last] = [Math.min(pressed.at, at), Math.max(pressed.at, at) + 1];
    selected.style.left = 100 * share(first) + "%";
    selected.style.width = 100 * (share(last) - share(first)) + "%";
  });
  plot.addEventListener("pointerup", () => {
    if (pressed && !selected.hidden) view(Math.min(pressed.at, at), Math.abs(pressed.at - at) + 1);
    pressed = null;
    selected.hidden = true;
  });
  plot.addEventListener("pointercancel", () => { pressed = null; selected.hidden = true; });
  plot.addEventListener("dblclick", () => enlarge(0));
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("focus", () => { if (plot.matches(":focus-visible")) show(at); });
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -25, PageDown: 25, Home: -count, End: count }[event.key];
    const zoomed = { "+": 0.5, "=": 0.5, "-": 2, 0: 0 }[event.key];
    if (by) { event.preventDefault(); show(at + by); }
    if (zoomed !== undefined) { event.preventDefault(); enlarge(zoomed); show(at); }
    if (event.key === "Escape") hide();
  });
  for (const button of zoom.querySelectorAll("button"))
    button.addEventListener("click", () => enlarge(Number(button.dataset.by)));
  zoom.hidden = false;
}
