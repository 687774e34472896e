// Which view is shown, by the address; keys; dialogs.
const VIEWS = [
  { name: "overview", title: "Overview" },
  { name: "map", title: "Map" },
  { name: "neighbours", title: "Images" },
  {
    name: "duplicates", title: "Duplicates", about: () => "groups of copies",
    lead: D.splits.length > 1
      ? "Images that show the same; copies that stand in both splits come first. One of each group is marked to be kept."
      : "Images that show the same. One of each group is marked to be kept.",
    none: "No duplicates were found.",
  },
  {
    name: "wrong-labels", title: "Wrong labels", absent: !LABELS,
    about: () => (D.wrong === null ? "suspects" : D.ownLabel < 0.6 ? "suspects, most of them innocent"
      : `suspects; about ${counted(D.wrong, "label")} may be wrong`),
    lead: "Images that look like another class, the strongest suspicion first." +
      (D.ownLabel === null ? "" : ` On average ${percent(D.ownLabel)} of an image's neighbours have its label` +
      (D.ownLabel < 0.6 ? ": with so few, most suspects are innocent." : ".")),
    none: "No label stands out as wrong.",
  },
  {
    name: "surprising", title: "Surprising", about: () => "match another image best",
    lead: "Images whose own best match is another image: views of it look more like that one.",
    none: D.windowed ? "Every image is its own best match."
      : "The features hold one view of each image, which is always its own best match. A run or an encoder can say more.",
  },
  {
    name: "lonely", title: "Lonely", about: () => "nobody's neighbour",
    lead: "Images that are no other image's neighbour, the farthest from all others first.",
    none: "Every image is somebody's neighbour.",
  },
];
for (const view of VIEWS) if (view.none) view.count = () => (view.absent ? 0 : countOf(view.name));

let route = { view: "overview", params: {} };
let current = {};

function address(view, params = {}) {
  const query = new URLSearchParams(Object.entries(params).filter(([, v]) => v !== undefined && v !== "")
    .map(([key, value]) => [key, String(value)]));
  return `#/${view}${[...query].length ? `?${query}` : ""}`;
}

function read() {
  const [view, query] = location.hash.replace(/^#\/?/, "").split("?");
  const known = VIEWS.some(({ name }) => name === view);
  return { view: known ? view : "overview", params: known ? Object.fromEntries(new URLSearchParams(query || "")) : {} };
}

function go(view, params = {}, replace = false) {
  if (replace) history.replaceState(null, "", address(view, params));
  else history.pushState(null, "", address(view, params));
  render(replace);
}

function replaceParams(changes) {  // the address follows, without a new step in the history
  route.params = { ...route.params, ...changes };
  history.replaceState(null, "", address(route.view, route.params));
}

function render(still = false) {
  const before = route;
  route = read();
  if (current.feed) current.feed.stop();
  if (current.stop) current.stop();
  if ($("look").open) $("look").close();
  const view = VIEWS.find(({ name }) => name === route.view);
  if (route.view === "overview") current = { nodes: overview() };
  else if (route.view === "map") current = mapView(route.params);
  else if (route.view === "neighbours") current = neighboursView(route.params);
  else if (view.absent) {
    current = { nodes: [h("h2", {}, view.title), h("p", { class: "empty" }, "These images have no labels, so no label " +
      "can be wrong. Sort them into one folder per class, or give an .npz file with labels, and explore again.")] };
  } else current = listView(view, route.params);
  $("main").replaceChildren(...current.nodes);
  $("views").replaceChildren(...VIEWS.map((one) => h("a", {
    href: address(one.name), "aria-current": one === view ? "page" : null,
  }, one.title, one.count && !one.absent ? h("span", { class: "count" }, number(one.count())) : null)));
  if (document.activeElement !== $("search")) $("search").value = route.params.q || "";
  document.title = `${view.title} · adasim explore`;
  if (current.feed) current.feed.start();
  if (current.start) current.start();
  const moved = before.view !== route.view || before.params.image !== route.params.image;
  if (!still && moved) {
    if (!current.feed || !current.feed.at) scrollTo(0, 0);
    $("main").focus({ preventScroll: true });
    say(document.querySelector("main h2").textContent);
  }
}

function choose(step) {  // left and right within an item or a grid, or in the closer look
  if ($("look").open && !current.feed) {
    const { ids, second } = looking;
    current.choose(ids[Math.min(Math.max(1, ids.indexOf(second) + step), ids.length - 1)]);
  } else if (current.feed) {
    const item = current.items[current.feed.at];
    if (!item) return;
    const ids = choosable(route.view, item);
    const at = ids.indexOf(item.chosen);
    item.chosen = ids[Math.min(Math.max(0, at + step), ids.length - 1)];
    current.feed.fill(current.feed.at);
    say(title(item.chosen));
    if ($("look").open) current.show();
  } else if (current.tiles) {
    const tiles = current.tiles();
    const at = tiles.indexOf(document.activeElement);
    const next = tiles[Math.min(Math.max(0, at + step), tiles.length - 1)];
    if (next) next.focus();
  }
}

function takeBack() {
  const where = undo();
  if (!where) return say("There is nothing to undo.");
  chosenKeepers.delete(where.ids[0]);
  say("The last verdict is undone.");
  $("toast").hidden = true;
  if (current.feed) {
    const at = current.items.findIndex((item) => item.ids[0] === where.ids[0]);
    current.refresh();
    if (route.view === where.view && at >= 0) current.feed.move(at);
    if ($("look").open) current.show();
  } else render(true);
}

function keepChosen() {
  const item = current.feed && route.view === "duplicates" && current.items[current.feed.at];
  if (!item || item.chosen === undefined) return;
  const follows = item.chosen !== keeperOf(item) && verdictOf("duplicates", item) === "reject";
  chosenKeepers.set(item.ids[0], item.chosen);
  if (follows) decide(changesFor("duplicates", item, "reject", item.chosen), { view: "duplicates", ids: item.ids });
  current.feed.fill(current.feed.at);
  if ($("look").open) current.show();
  say(`Keep ${title(item.chosen)}`);
}

function redraw() {  // verdicts came from elsewhere
  chosenKeepers.clear();
  current.refresh ? current.refresh() : render(true);
}

function otherView(step) {
  const at = VIEWS.findIndex(({ name }) => name === route.view);
  go(VIEWS[(at + step + VIEWS.length) % VIEWS.length].name);
}

function step(by) {  // to another item; the closer look follows
  if (!current.feed) return choose(by);
  current.feed.move(current.feed.at + by);
  if ($("look").open) current.show();
}

const KEYS = {
  j: () => step(1),
  k: () => step(-1),
  ArrowDown: () => step(1),
  ArrowUp: () => step(-1),
  ArrowRight: () => choose(1),
  ArrowLeft: () => choose(-1),
  Home: () => current.feed.move(0),
  End: () => current.feed.move(current.items.length - 1),
  " ": () => ($("look").open ? $("look").close() : current.show()),
  Enter: () => {
    const item = current.feed && current.items[current.feed.at];
    if (item) go("neighbours", { image: item.chosen === undefined ? item.ids[0] : item.chosen });
    else if ($("look").open) go("neighbours", { image: looking.second ?? looking.ids[0] });
  },
  Backspace: () => history.back(),
  a: () => current.many && current.many(),
  m: keepChosen,
  u: takeBack,
  "[": () => otherView(-1),
  "]": () => otherView(1),
  "/": () => $("search").select(),
  "?": () => $("help-dialog").showModal(),
};
const IN_LOOK = ["j", "k", "ArrowDown", "ArrowUp", "ArrowRight", "ArrowLeft", " ", "Enter", "m", "u", "1", "2", "3", "4"];
for (const place of [0, 1, 2, 3]) KEYS[String(place + 1)] = () => current.judge && current.judge(place);

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  if (document.querySelector("dialog[open]:not(#look)") || event.target.closest("input, select, textarea")) return;
  if (event.key === "Enter" && event.target.closest("a, button")) return;
  if (event.key === " " && (event.target.closest("button") || !($("look").open || current.show))) return;
  if ($("look").open && !IN_LOOK.includes(event.key)) return;
  const scrolls = ["ArrowDown", "ArrowUp", "Home", "End"].includes(event.key) && !current.feed;
  const action = KEYS[event.key];
  if (!action || scrolls) return;
  event.preventDefault();
  action();
});

$("search-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const view = VIEWS.some(({ name, count }) => count && name === route.view) ? route.view : "neighbours";
  const rest = view === route.view && route.params.image === undefined ? route.params : {};
  go(view, { ...rest, at: undefined, shown: undefined, q: $("search").value.trim() });
  $("main").focus({ preventScroll: true });
});
$("search").addEventListener("keydown", (event) => {
  if (event.key === "Escape") $("main").focus({ preventScroll: true });
});
$("undo").addEventListener("click", takeBack);
$("help").addEventListener("click", () => $("help-dialog").showModal());
$("skip").addEventListener("click", (event) => {
  event.preventDefault();
  (current.feed && current.items.length ? current.feed.shown.get(current.feed.at) : $("main")).focus();
});

function showExport() {
  const listed = TABLES[route.view];
  const choices = [["verdicts", VERDICT_COLUMNS, verdictRows()],
    ...(listed ? [[route.view, listed.columns, listed.rows]] : [])];
  $("export-choices").replaceChildren(
    ...choices.flatMap(([name, columns, rows]) => ["csv", "json"].map((kind) =>
      h("button", { type: "button", onclick: () => exportTable(name, columns, rows, kind) },
        `${name}.${kind}`, h("span", {}, `${number(rows.length)} rows`)))));
  $("kept").textContent = stored ? "Verdicts are kept in this browser, too."
    : "This browser cannot keep verdicts: save them before you leave, and load them to go on.";
  $("loaded").textContent = "";
  if (!$("export-dialog").open) $("export-dialog").showModal();
}
$("export").addEventListener("click", showExport);
$("notice-save").addEventListener("click", () => exportTable("verdicts", VERDICT_COLUMNS, verdictRows(), "csv"));
for (const id of ["load", "notice-load"]) $(id).addEventListener("click", () => $("file").click());
$("file").addEventListener("change", async () => {
  const [file] = $("file").files;
  if (!file) return;
  const told = loadVerdicts(file.name, await file.text());
  $("file").value = "";  // so that the same file can be chosen again
  redraw();
  showExport();
  $("loaded").textContent = told;
});
addEventListener("beforeunload", (event) => {
  if (!unsaved) return;
  event.preventDefault();
  event.returnValue = true;  // what browsers before 2023 ask for
});

// Light or dark: as the system has it, until somebody says otherwise.
const THEMES = ["", "light", "dark"];
function theme(name) {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
}
try { theme(localStorage.getItem("adasim-explore-theme") || ""); } catch { /* as the system has it */ }
$("theme").addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme || "") + 1) % THEMES.length];
  theme(next);
  if (route.view === "map") render(true);  // its colours are drawn
  say(next ? `${next} colours` : "colours of the system");
  try { localStorage.setItem("adasim-explore-theme", next); } catch { /* until the page is closed */ }
});

addEventListener("hashchange", () => render());
addEventListener("storage", (event) => {  // another tab of this page has a verdict
  if (event.key !== KEY) return;
  merge(() => event.newValue);
  if (!merge()) save();  // it wrote before it knew of a verdict of ours
  redraw();
});
$("source").append(text(D.source));
render(true);
