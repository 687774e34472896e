// What narrows a list down: class, split, words, an area of the map, findings and verdicts. All of it is in the address.
const wordsOf = (query) => (query || "").toLowerCase().split(/\s+/).filter(Boolean);
const found = (id, word) =>
  String(id) === word || nameOf(id).toLowerCase().includes(word) || labelOf(id).toLowerCase().includes(word);

function choice(key, params, options, label) {
  const id = `filter-${key}`;
  const select = h("select", { id, onchange: () => go(route.view, { ...route.params, at: undefined, shown: undefined, [key]: select.value }) },
    options.map(([value, name]) => h("option", { value, selected: (params[key] || "") === String(value) }, name)));
  return h("label", { for: id }, `${label} `, select);
}

const classChoice = (key, params) => D.classes.length > 1 && D.classes.length <= MANY_CLASSES
  ? choice(key, params, [["", "every class"], ...D.classes.map((name, c) => [c, name])], "Label") : null;
const splitChoice = (params) => D.splits.length > 1
  ? choice("split", params, [["", "both"], ...D.splits.map((name) => [name, name])], "Split") : null;

// A filter in words, which a click removes: the parameters that it is made of.
function chip(words, keys) {
  const removed = Object.fromEntries([...keys, "at"].map((key) => [key, undefined]));
  return h("a", { class: "chip", href: address(route.view, { ...route.params, ...removed }) }, text(words), " ✕",
    h("span", { class: "hidden" }, " (remove the filter)"));
}

// Images by list: {view: Set of ids}, of what the list shows at first
let findings = null;
function findingsOf(view) {
  if (!findings) {
    findings = {};
    for (const { name, count, absent } of VIEWS) {
      if (!count || absent) continue;
      const least = lowestOf(name, {});
      findings[name] = new Set(TABLES[name].items.filter((row) => !(Number(row.score) < least)).map(({ id }) => Number(id)));
    }
  }
  return findings[view] || new Set();
}

// All images that fit the parameters of the address: label, split, q, area, found, verdict.
function fitting(params) {
  const label = params.label === undefined || params.label === "" ? -1 : Number(params.label);
  const words = wordsOf(params.q);
  const inside = params.area ? insideArea(params.area) : () => true;
  const listed = params.found ? findingsOf(params.found) : null;
  const ids = [];
  for (let i = 0; i < D.count; i++) {
    if ((label < 0 || (LABELS && LABELS[i] === label)) && (!params.split || splitOf(i) === params.split) &&
      (!listed || listed.has(i)) && (!params.verdict || verdictName(i) === params.verdict) && inside(i) &&
      words.every((word) => found(i, word))) ids.push(i);
  }
  return ids;
}
const verdictName = (i) => (verdictOn(i) || { verdict: "none" }).verdict;
