// A histogram of a list's scores with a handle: what scores less is not listed. The handle is a range input, so keys and
// screen readers have it, too.
const BINS = 60;

const lowestOf = (view, params) => {  // the least score that is listed
  if (params.min !== undefined && Number.isFinite(Number(params.min))) return Number(params.min);
  return TABLES[view].threshold ?? -Infinity;
};

// items: all of the list, with their scores; onMove(least) while the handle moves, onSet(least) when it rests
function thresholdPanel(items, least, { onMove, onSet }) {
  const scores = items.map(({ score }) => score).filter(Number.isFinite);
  const [low, high] = [scores.reduce((a, b) => Math.min(a, b), Infinity), scores.reduce((a, b) => Math.max(a, b), -Infinity)];
  if (scores.length < 8 || !(high > low)) return null;
  const counts = new Array(BINS).fill(0);
  for (const score of scores) counts[Math.min(BINS - 1, Math.floor(((score - low) / (high - low)) * BINS))]++;
  const most = Math.max(...counts);
  const [width, height] = [600, 56];
  const bars = counts.map((count, n) => {
    const tall = Math.sqrt(count / most) * height;  // else the few that matter would not be seen beside the many
    return svg("rect", { x: (n * width) / BINS + 0.5, y: height - tall, width: width / BINS - 1, height: tall });
  });
  const digits = Math.max(0, Math.min(4, 3 - Math.floor(Math.log10(high - low + 1e-9))));
  const step = Number((10 ** -digits).toFixed(4));
  const floor = Math.floor(low / step) * step;
  const input = h("input", { type: "range", id: "least", min: floor.toFixed(digits), max: (Math.ceil(high / step) * step).toFixed(digits), step,
    "aria-describedby": "above" });
  input.value = String(Math.max(floor, least));
  const above = h("output", { id: "above", for: "least" });
  const show = (shown) => {
    const from = Number(input.value);
    bars.forEach((bar, n) => bar.classList.toggle("below", low + ((n + 1) * (high - low)) / BINS <= from));
    above.replaceChildren(h("b", {}, number(shown)), ` of ${number(items.length)} listed`);
    input.setAttribute("aria-valuetext", `${from.toFixed(digits)}: ${shown} of ${items.length} listed`);
  };
  input.addEventListener("input", () => onMove(Number(input.value)));
  input.addEventListener("change", () => onSet(Number(input.value) <= floor ? floor : Number(input.value)));
  const element = h("div", { class: "threshold" },
    h("label", { for: "least" }, "Least score"),
    h("div", { class: "scale" }, svg("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" }, ...bars), input),
    above);
  return { element, show };
}
