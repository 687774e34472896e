// The four lists to go through: duplicates, wrong labels, surprising, lonely.
const VERDICTS = {
  duplicates: [
    ["keep", "Keep all"], ["reject", "Leave out the copies"], ["all", "Leave out all"], ["unsure", "Unsure"]],
  "wrong-labels": [
    ["keep", "Label is right"], ["reject", "Leave out"], ["relabel", "Take the suggestion"], ["unsure", "Unsure"]],
  surprising: [["keep", "Keep"], ["reject", "Leave out"], ["relabel", "Wrong label"], ["unsure", "Unsure"]],
  lonely: [["keep", "Keep"], ["reject", "Leave out"], ["relabel", "Wrong label"], ["unsure", "Unsure"]],
};

// An item is a list of rows: one, or a group of duplicates.
function itemsOf(view) {
  const groups = view === "duplicates" ? GROUPS : TABLES[view].items.map((row) => [row]);
  return groups.map((rows) => {
    const ids = rows.map((row) => Number(row.id));
    return { rows, ids, row: rows[0] };
  });
}

// The image of a group that stays if its copies go: the one that was chosen since the last undo; or the only one with the
// verdict to keep it; or the first that no other list leaves out.
const chosenKeepers = new Map();  // by the first image of the group
function keeperOf({ ids }) {
  if (chosenKeepers.has(ids[0])) return chosenKeepers.get(ids[0]);
  const kept = ids.filter((id) => (given(id, "duplicates") || {}).verdict === "keep");
  if (kept.length === 1) return kept[0];
  return ids.find((id) => !leftOutElsewhere(id, "duplicates")) ?? ids[0];
}

function changesFor(view, item, verdict, keeper = keeperOf(item)) {
  const entry = (name, label) => ({ verdict: name, view, ...(label ? { label } : {}) });
  if (view === "duplicates") {
    return item.ids.map((id) => [id, entry(
      verdict === "all" ? "reject" : verdict === "reject" && id === keeper ? "keep" : verdict)]);
  }
  return [[item.ids[0], entry(verdict, verdict === "relabel" ? item.row.suggested : "")]];
}

// The verdict that an item has in this list: what pressing a button for it would have given, for all of its images.
function verdictOf(view, item) {
  const same = (a, b) => b && a.verdict === b.verdict;
  const found = VERDICTS[view].find(([verdict]) =>
    changesFor(view, item, verdict).every(([id, entry]) => same(entry, given(id, view))));
  return found ? found[0] : null;
}
const reviewed = (view, item) => item.ids.every((id) => given(id, view) || leftOutElsewhere(id, view));

function matches(item, query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  return words.every((word) => item.ids.some((id) => found(id, word)) ||
    (item.row.suggested || "").toLowerCase().includes(word) || (item.row.kind || "").includes(word));
}
const found = (id, word) =>
  String(id) === word || nameOf(id).toLowerCase().includes(word) || labelOf(id).toLowerCase().includes(word);

function listView(view, params) {
  const { name } = view;
  const all = itemsOf(name);
  const [from, to] = [params.from, params.to].map((c) => (c === undefined ? "" : D.classes[Number(c)] || ""));
  const items = all.filter((item) =>
    (params.only === undefined || item.ids.includes(Number(params.only))) &&
    (!params.q || matches(item, params.q)) && (!from || item.row.label === from) &&
    (!to || item.row.suggested === to) && (!params.kind || item.row.kind === params.kind) &&
    (!params.show || (params.show === "open") !== reviewed(name, item)));
  const progress = h("p", { class: "progress", id: "progress" });
  const tell = () => {
    const now = all.filter((item) => reviewed(name, item)).length;
    progress.replaceChildren(h("span", { class: "bar", "aria-hidden": "true" },
      h("span", { style: { width: `${(100 * now) / Math.max(1, all.length)}%` } })),
    `${number(now)} of ${number(all.length)} reviewed`);
  };
  tell();
  const filters = h("div", { class: "filters" }, progress, choice("show", params,
    [["", "all"], ["open", "not reviewed"], ["done", "reviewed"]], "Show"),
  name === "duplicates" ? choice("kind", params,
    [["", "every kind"], ["exact", "exact"], ["near", "near"], ["same scene", "same scene"]], "Kind") : null,
  from || to ? chip(`${from || "any"} → ${to || "any"}`, ["from", "to"]) : null,
  params.only === undefined ? null : chip(`image ${params.only}`, ["only"]));
  const head = [h("h2", {}, view.title), h("p", { class: "lead" }, view.lead), ...(all.length ? [filters] : [])];
  if (!items.length) {
    const nothing = all.length ? "Nothing in this list fits the filter." : view.none;
    return { nodes: [...head, h("p", { class: "empty" }, nothing, from ? " " : "",
      from ? h("a", { href: address("neighbours", { label: params.from }) }, `All images labelled ${from}`) : null)] };
  }
  const feed = new Feed({
    items,
    label: view.title,
    at: Number(params.at) || 0,
    make: (item, index) => card(view, item, index),
    onMove: (at) => replaceParams({ at: at || undefined }),
  });
  const judge = (place) => {
    const item = items[feed.at];
    const [verdict, words] = VERDICTS[name][place];
    decide(changesFor(name, item, verdict), { view: name, ids: item.ids });
    feed.fill(feed.at);
    tell();
    say(`${words}. ${feed.at + 1 < items.length ? "Next." : "That was the last one."}`);
    feed.move(feed.at + 1);
  };
  feed.element.addEventListener("click", (event) => {
    const article = event.target.closest("article");
    if (!article) return;
    const index = Number(article.dataset.index);
    const button = event.target.closest("button[data-place]");
    if (button || !event.target.closest("a")) feed.move(index, !button);
    if (button) judge(Number(button.dataset.place));
  });
  return { nodes: [...head, feed.element], feed, items, judge, refresh: () => { feed.refresh(); tell(); } };
}

function choice(key, params, options, label) {
  const id = `filter-${key}`;
  const select = h("select", { id, onchange: () => go(route.view, { ...route.params, at: undefined, [key]: select.value }) },
    options.map(([value, name]) => h("option", { value, selected: (params[key] || "") === value }, name)));
  return h("label", { for: id }, `${label} `, select);
}

// A filter in words, which a click removes: the parameters that it is made of.
function chip(words, keys) {
  const removed = Object.fromEntries([...keys, "at"].map((key) => [key, undefined]));
  return h("a", { class: "chip", href: address(route.view, { ...route.params, ...removed }) }, text(words), " ✕",
    h("span", { class: "hidden" }, " (remove the filter)"));
}

const choosable = (view, item) => (view === "duplicates" ? item.ids : [item.ids[0], ...strip(item.ids[0])]);
const strip = (i) => supportOf(i).map(({ id }) => id).filter((id) => id !== i).slice(0, 8);

function card(view, item, index) {
  const { name } = view;
  const given = verdictOf(name, item);
  const i = item.ids[0];
  const chosen = item.chosen;
  const buttons = h("div", { class: "verdicts", role: "group", "aria-label": "Verdict" },
    VERDICTS[name].map(([verdict, words], place) =>
      h("button", { type: "button", "data-place": place, class: verdict, "aria-pressed": String(given === verdict),
        "aria-keyshortcuts": place + 1, tabindex: "-1" }, h("kbd", { "aria-hidden": "true" }, place + 1), ` ${words}`)));
  let pictures;
  let heading;
  if (name === "duplicates") {
    heading = [h("span", { class: `kind ${item.row.kind.replace(" ", "-")}` }, item.row.kind),
      item.row.straddles === "yes" ? h("span", { class: "kind straddles" }, `in ${D.splits.join(" and ")}`) : null,
      ` ${item.ids.length} images`];
    const keeper = keeperOf(item);
    pictures = item.ids.slice(0, 12).map((id) => tile(id, {
      chosen: id === chosen, note: [id === keeper ? "keep" : "", leftOutElsewhere(id, name) ? "left out" : "",
        D.splits.length > 1 ? splitOf(id) : id === keeper ? "" : shortName(id)].filter(Boolean).join(" · ") }));
    if (item.ids.length > 12) pictures.push(h("span", { class: "more" }, `+${item.ids.length - 12}`));
  } else {
    heading = [text(shortName(i), "file")];
    if (labelOf(i)) heading.push(h("span", { class: "label" }, text(labelOf(i))));
    if (item.row.suggested) heading.push(h("span", { class: "arrow" }, "→"), h("span", { class: "label new" }, text(item.row.suggested)));
    const own = labelOf(i);
    const others = supportOf(i).filter(({ id }) => id !== i).slice(0, 8);
    const most = Math.max(1e-9, ...others.map(({ p }) => p));
    pictures = [tile(i, { chosen: chosen === i, note: labelOf(i) || shortName(i) }), h("span", { class: "rule" }),
      ...others.map(({ id, p }) => tile(id, { p, most, chosen: id === chosen, differs: own && labelOf(id) !== own }))];
  }
  const opinions = name === "wrong-labels" ? h("p", { class: "opinions" },
    "Second opinions: ", h("b", {}, item.row.agreeing_neighbours ? percent(Number(item.row.agreeing_neighbours)) : "–"), " of its nearest agree with the label · ",
    "SelfClean ratio ", h("b", {}, item.row.distance_ratio ? Number(item.row.distance_ratio).toFixed(2) : "–"),
    !item.row.distance_ratio ? "" : Number(item.row.distance_ratio) < 0.5 ? " (another class is closer)"
      : " (its own class is closer)") : null;
  const out = leftOutElsewhere(i, name);
  const files = name === "duplicates"
    ? h("p", { class: "files" }, item.ids.slice(0, 3).flatMap((id, n) => [n ? " · " : "", text(nameOf(id))]))
    : h("p", { class: "files" }, out ? `Left out in ${out.view} · ` : "", text(nameOf(i)),
      ` · ${splitOf(i)} · image ${i} · ${sizeOf(i)}`);
  return [
    h("div", { class: "strip" }, pictures),
    h("div", { class: "words" }, h("h3", {}, heading), h("p", { class: "reason" }, text(item.row.reason)), opinions, files),
    buttons,
  ];
}
