"use strict";
// Shows what is alive at the moment under the pointer, or at the one that the arrow keys have moved to.
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
for (const plot of document.querySelectorAll(".plot")) {
  const step = JSON.parse(document.getElementById(plot.dataset.of).textContent);
  const count = step.ticks.length, names = Object.keys(step.category_bytes).reverse();
  const tip = plot.querySelector(".tip"), cursor = plot.querySelector(".cursor");
  let at = step.marked;
  const phase = (index) => step.phases.reduce((found, one) => (one[1] <= index ? one[0] : found), "");
  const show = (index) => {
    at = Math.max(0, Math.min(count - 1, index));
    const x = (at + 0.5) / count;
    cursor.hidden = tip.hidden = false;
    cursor.style.left = 100 * x + "%";
    tip.replaceChildren();
    const title = document.createElement("b");
    title.append(size(names.reduce((sum, name) => sum + step.category_bytes[name][at], 0)) + " in the " + phase(at));
    tip.append(title);
    for (const name of names)
      if (step.category_bytes[name][at]) row(tip, name.replaceAll("_", " "), size(step.category_bytes[name][at]), name);
    row(tip, "module", step.modules[step.module_at[at]] || "(the step itself)");
    row(tip, "operator", step.operators[step.operator_at[at]]);
    const width = plot.clientWidth, beside = x < 0.5 ? x * width + 10 : x * width - 10 - tip.offsetWidth;
    tip.style.left = Math.max(-plot.offsetLeft / 2, Math.min(beside, width - tip.offsetWidth)) + "px";
  };
  const hide = () => { cursor.hidden = tip.hidden = true; };
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    show(Math.floor(((event.clientX - box.left) / box.width) * count));
  });
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("focus", () => { if (plot.matches(":focus-visible")) show(at); });
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -25, PageDown: 25, Home: -count, End: count }[event.key];
    if (by) { event.preventDefault(); show(at + by); }
    if (event.key === "Escape") hide();
  });
}
