// The four lists to go through: duplicates, wrong labels, surprising, lonely.
const VERDICTS = {
  duplicates: [
    ["keep", "Keep all"], ["reject", "Leave out copies"], ["all", "Leave out all"], ["unsure", "Unsure"]],
  "wrong-labels": [
    ["keep", "Label is right"], ["reject", "Leave out"], ["relabel", "Take the suggestion"], ["unsure", "Unsure"]],
  surprising: [["keep", "Keep"], ["reject", "Leave out"], ["relabel", "Wrong label"], ["unsure", "Unsure"]],
  lonely: [["keep", "Keep"], ["reject", "Leave out"], ["relabel", "Wrong label"], ["unsure", "Unsure"]],
};

// An item is a list of rows: one, or a group of duplicates.
const listed = {};
function itemsOf(view) {
  listed[view] ??= (view === "duplicates" ? GROUPS : TABLES[view].items.map((row) => [row])).map((rows) => ({
    rows, row: rows[0], ids: rows.map((row) => Number(row.id)), score: rows[0].score ? Number(rows[0].score) : Infinity }));
  return listed[view];
}
const countOf = (view) => itemsOf(view).filter(({ score }) => score >= lowestOf(view, {})).length;

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
  const match = VERDICTS[view].find(([verdict]) =>
    changesFor(view, item, verdict).every(([id, entry]) => same(entry, given(id, view))));
  return match ? match[0] : null;
}
const reviewed = (view, item) => item.ids.every((id) => given(id, view) || leftOutElsewhere(id, view));

function matches(item, words) {
  return words.every((word) => item.ids.some((id) => found(id, word)) ||
    (item.row.suggested || "").toLowerCase().includes(word) || (item.row.kind || "").includes(word));
}

// Whether an item fits all filters but the handle of the histogram.
function fitsFilters(name, params) {
  const [from, to] = [params.from, params.to].map((c) => (c === undefined ? "" : D.classes[Number(c)] || ""));
  const words = wordsOf(params.q);
  return (item) => (params.only === undefined || item.ids.includes(Number(params.only))) && matches(item, words) &&
    (!from || item.rows.some((row) => row.label === from)) && (!to || item.row.suggested === to) &&
    (!params.split || item.rows.some((row) => row.split === params.split)) && (!params.kind || item.row.kind === params.kind) &&
    (!params.show || (params.show === "open") !== reviewed(name, item));
}

function listView(view, params) {
  const { name } = view;
  const all = itemsOf(name);
  for (const item of all) item.chosen = undefined;
  const fits = all.filter(fitsFilters(name, params));
  let least = params.only === undefined ? lowestOf(name, params) : -Infinity;
  let items = fits.filter(({ score }) => score >= least);
  const progress = h("p", { class: "progress", id: "progress" });
  const many = h("button", { type: "button", class: "wide", id: "many", "aria-haspopup": "dialog", "aria-keyshortcuts": "a",
    onclick: () => many.onAll() });
  const handle = params.only === undefined ? thresholdPanel(fits, least, {
    onMove: (to) => { least = to; items = fits.filter(({ score }) => score >= least); feed.replace(items); tell(); },
    onSet: (to) => replaceParams({ min: to, at: undefined }),
  }) : null;
  const tell = () => {
    const now = items.filter((item) => reviewed(name, item)).length;
    progress.replaceChildren(h("span", { class: "bar", "aria-hidden": "true" },
      h("span", { style: { width: `${(100 * now) / Math.max(1, items.length)}%` } })),
    `${number(now)} of ${number(items.length)} reviewed`);
    many.replaceChildren(`Verdict for all ${number(items.length)}… `, h("kbd", { "aria-hidden": "true" }, "a"));
    many.disabled = !items.length;
    nothing.hidden = items.length > 0;
    if (handle) handle.show(items.length);
  };
  const [from, to] = [params.from, params.to].map((c) => (c === undefined ? "" : D.classes[Number(c)] || ""));
  const filters = h("div", { class: "filters" }, progress, choice("show", params,
    [["", "all"], ["open", "not reviewed"], ["done", "reviewed"]], "Show"),
  name === "duplicates" ? choice("kind", params,
    [["", "every kind"], ["exact", "exact"], ["near", "near"], ["same scene", "same scene"]], "Kind") : null,
  to ? chip(`${from || "any"} → ${to}`, ["from", "to"]) : classChoice("from", params), splitChoice(params),
  params.q ? chip(params.q, ["q"]) : null,
  params.only === undefined ? null : chip(`image ${params.only}`, ["only"]), many);
  const nothing = h("p", { class: "empty" }, all.length ? "Nothing in this list fits the filters." : view.none, from ? " " : "",
    from ? h("a", { href: address("neighbours", { label: params.from }) }, `All images labelled ${from}`) : null);
  const head = [h("h2", {}, view.title), h("p", { class: "lead" }, view.lead)];
  if (!all.length) return { nodes: [...head, nothing] };
  const feed = new Feed({
    items,
    kind: name,
    label: view.title,
    at: Number(params.at) || 0,
    make: (item, index) => card(view, item, index),
    onMove: (at) => replaceParams({ at: at || undefined }),
    onSee: (item) => shownIn(name, item).forEach((id) => seen.add(id)),
  });
  const after = () => { feed.refresh(); tell(); };
  many.onAll = () => judgeMany({
    view: name, items, done: after, changes: (item, verdict) => changesFor(name, item, verdict), isReviewed: (item) => reviewed(name, item),
    what: `All that the list shows now${handle ? `, with a score of at least ${Math.max(least, 0).toFixed(2)}` : ""}.`,
  });
  const judge = (place) => {
    const item = items[feed.at];
    if (!item) return;
    const [verdict, words] = VERDICTS[name][place];
    const unseen = item.ids.filter((id) => !seen.has(id));
    if (unseen.length && name === "duplicates") {  // nothing is judged that was not seen
      if (!$("look").open) return show(`The card showed ${number(item.ids.length - unseen.length)} of these ${images(item.ids.length)}. Look at all of them, then press again.`);
      if (!sawTheEnd()) return say("There are more images below.");
    }
    decide(changesFor(name, item, verdict), { view: name, ids: item.ids });
    item.ids.forEach((id) => seen.add(id));
    feed.fill(feed.at);
    tell();
    say(`${words}. ${feed.at + 1 < items.length ? "Next." : "That was the last one."}`);
    if ($("look").open && feed.at + 1 >= items.length) $("look").close();
    feed.move(feed.at + 1);
    if ($("look").open) show();
  };
  const show = (question) => {  // the item side by side
    const item = items[feed.at];
    if (!item) return;
    const keeper = name === "duplicates" ? keeperOf(item) : -1;
    lookAt({
      ids: choosable(name, item), second: item.chosen, question, heading: cardHeading(view, item),
      shares: name === "duplicates" ? new Map() : sharesOf(item.ids[0]), words: (id) => (id === keeper ? "keep" : ""),
      buttons: verdictButtons(name, verdictOf(name, item), (place) => judge(place)),
    });
  };
  feed.element.addEventListener("click", (event) => {
    const article = event.target.closest("article");
    if (!article) return;
    const index = Number(article.dataset.index);
    const button = event.target.closest("button[data-place]");
    const link = event.target.closest("a[data-image]");
    if (link && (event.ctrlKey || event.metaKey || event.shiftKey)) return;  // a new tab or window
    if (link) event.preventDefault();
    feed.move(index, !button);
    if (button) return judge(Number(button.dataset.place));
    if (link) items[index].chosen = Number(link.dataset.image);
    if (link || event.target.closest(".more")) show();
  });
  tell();
  return {
    nodes: [...head, filters, handle ? handle.element : null, nothing, feed.element].filter(Boolean), feed, judge, show, many: () => many.onAll(),
    get items() { return items; },
    refresh: after,
    choose: (id) => { items[feed.at].chosen = id; feed.fill(feed.at); show(); },
  };
}

function verdictButtons(name, given, judge) {
  return h("div", { class: "verdicts", role: "group", "aria-label": "Verdict" },
    VERDICTS[name].map(([verdict, words], place) =>
      h("button", { type: "button", "data-place": place, class: verdict, "aria-pressed": String(given === verdict),
        "aria-keyshortcuts": place + 1, tabindex: judge ? "0" : "-1", onclick: judge ? () => judge(place) : null },
      h("kbd", { "aria-hidden": "true" }, place + 1), ` ${words}`)));
}

// ---- a card ----

const choosable = (view, item) => (view === "duplicates" ? item.ids : [item.ids[0], ...othersOf(item.ids[0]).map(({ id }) => id)]);

function spaceIn(name) {  // for the pictures of a card: how wide it is, their least and greatest width, and the gap between them
  const feed = current.feed || { columns: 1, element: $("main") };
  const style = getComputedStyle(document.documentElement);
  const [tileWidth, gap, beside, wider] = ["--tile", "--gap", "--beside", "--wider"].map((key) => parseFloat(style.getPropertyValue(key)));
  const width = (feed.element.clientWidth + 12) / feed.columns - 46;
  return name === "duplicates" ? { width, gap, least: 0.75 * tileWidth, most: wider * tileWidth } : { width: width - beside, gap, least: tileWidth };
}
function room(name) {  // how many pictures fit beside each other
  const { width, gap, least } = spaceIn(name);
  return Math.max(2, Math.floor((width + gap) / (least + gap)));
}

// The images of an item that its card shows.
function shownIn(name, item) {
  const ids = choosable(name, item);
  if (name !== "duplicates") return ids.slice(0, room(name) + 1);
  const fit = room(name);
  return ids.length <= fit ? ids : ids.slice(0, Math.max(1, fit - 1));
}

function pictureWidth(count) {  // of a group's images, which share the width
  const { width, gap, most } = spaceIn("duplicates");
  return Math.floor(Math.min(most, (width + gap) / count - gap));
}

function cardHeading({ name }, item) {
  const i = item.ids[0];
  if (name === "duplicates") {
    return [h("span", { class: `kind ${item.row.kind.replace(" ", "-")}` }, item.row.kind),
      item.row.straddles === "yes" ? h("span", { class: "kind straddles" }, `in ${D.splits.join(" and ")}`) : null,
      ` ${images(item.ids.length)}`];
  }
  return [
    labelOf(i) ? h("span", { class: "label" }, text(labelOf(i))) : null,
    item.row.suggested ? [h("span", { class: "arrow" }, "→ "), h("span", { class: "label new" }, text(item.row.suggested))] : null,
    text(shortName(i), "file")];
}

const SHOWN = new Set(["id", "split", "file", "label", "score", "suggested", "reason", "group", "kind", "keep", "straddles",
  "judge", "best_match", "nearest", "neighbours_own", "neighbours_suggested", "probe_own", "probe_suggested"]);  // or in the reason
const JUDGES = { both: "neighbours and probe agree", neighbours: "the neighbours say so, the probe does not",
  probe: "the probe says so, the neighbours do not" };
function numbersOf(row) {  // what else the list knows of an image
  const entries = Object.entries(row).filter(([column, value]) => !SHOWN.has(column) && value !== "");
  return [JUDGES[row.judge] || "", row.score ? `score ${Number(row.score).toFixed(2)}` : "",
    ...entries.map(([column, value]) => `${column.replaceAll("_", " ")} ${Number.isNaN(Number(value)) ? value : Number(value).toFixed(2)}`)]
    .filter(Boolean).join(" · ");
}

function card(view, item) {
  const { name } = view;
  const i = item.ids[0];
  const own = labelOf(i);
  const ids = shownIn(name, item);
  const keeper = name === "duplicates" ? keeperOf(item) : -1;
  let strip;
  if (name === "duplicates") {
    strip = ids.map((id) => tile(id, {
      chosen: id === item.chosen, note: [id === keeper ? "keep" : "", leftOutElsewhere(id, name) ? "left out" : "",
        D.splits.length > 1 ? splitOf(id) : id === keeper ? "" : shortName(id)].filter(Boolean).join(" · ") }));
    if (ids.length < item.ids.length) {
      strip.push(h("button", { type: "button", class: "more", tabindex: "-1" }, `+${number(item.ids.length - ids.length)}`,
        h("span", {}, "show all")));
    }
  } else {
    const shares = othersOf(i).filter(({ id }) => ids.includes(id));
    const most = Math.max(1e-9, ...shares.map(({ p }) => p));
    strip = shares.map(({ id, p }) => tile(id, { p, most, chosen: id === item.chosen, differs: own && labelOf(id) !== own }));
  }
  const out = leftOutElsewhere(i, name);
  const more = numbersOf(item.row);
  const files = name === "duplicates"
    ? h("p", { class: "files" }, `${more} · `, item.ids.slice(0, 3).flatMap((id, n) => [n ? " · " : "", text(nameOf(id))]))
    : h("p", { class: "files" }, out ? `Left out in ${out.view} · ` : "", `${more} · `, text(nameOf(i)), ` · image ${i} · ${sizeOf(i)}`);
  return [
    name === "duplicates" ? null : h("div", { class: "first" }, tile(i, { chosen: item.chosen === i, note: " " })),
    h("div", { class: "words" }, h("h3", {}, cardHeading(view, item)), h("p", { class: "reason" }, text(item.row.reason)),
      files),
    h("div", { class: "strip", style: name === "duplicates" ? { "--tile": `${pictureWidth(strip.length)}px` } : {} }, strip),
    verdictButtons(name, verdictOf(name, item)),
  ].filter(Boolean);
}
