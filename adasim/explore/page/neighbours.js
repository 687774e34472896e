// Images: all of them to choose from, narrowed down by filters; or one image with its neighbours.
const PAGE = 240;
const ticked = new Set();

function neighboursView(params) {
  return params.image === undefined ? browse(params) : around(Number(params.image));
}

// A verdict on images as a whole: what weighs more in a list is taken back.
function wholeChanges(i, verdict, label = "") {
  const entry = { verdict, view: "neighbours", ...(verdict === "relabel" && label ? { label } : {}) };
  const back = entriesOf(i).filter((one) => rank(one) < rank(entry)).map(({ view }) => [i, { verdict: null, view }]);
  return [...back, [i, entry]];
}

function judgeImages(ids, what, done) {
  judgeMany({ view: "neighbours", items: ids.map((id) => ({ ids: [id] })), what, done,
    changes: (item, verdict, label) => wholeChanges(item.ids[0], verdict, label), isReviewed: (item) => Boolean(verdictOn(item.ids[0])) });
}

// ---- all images ----

const inSight = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) if (isIntersecting) seen.add(Number(target.dataset.image));
}, { threshold: 0.5 });

function gridTile(i, changed) {
  const box = h("input", { type: "checkbox", "aria-label": `Select image ${i}`, checked: ticked.has(i), onchange: () => {
    if (box.checked) ticked.add(i);
    else ticked.delete(i);
    changed();
  } });
  const entry = verdictOn(i);
  const one = tile(i, { note: entry ? `${labelOf(i) ? `${labelOf(i)} · ` : ""}${MEANING[entry.verdict]}` : "" });
  one.tabIndex = 0;
  inSight.observe(one);
  return h("li", { class: entry ? entry.verdict : "" }, one, box);
}

function browse(params) {
  const ids = fitting(params);
  const many = h("button", { type: "button", class: "wide", id: "many", "aria-haspopup": "dialog", "aria-keyshortcuts": "a" });
  const chosen = () => ids.filter((i) => ticked.has(i));
  const onAll = () => {
    const some = chosen();
    judgeImages(some.length ? some : ids, some.length ? "The images that you have ticked." : "All images that fit the filters.",
      () => { ticked.clear(); render(true); });
  };
  const tell = () => {
    const some = chosen().length;
    many.replaceChildren(some ? `Verdict for ${number(some)} ticked… ` : `Verdict for all ${number(ids.length)}… `, h("kbd", { "aria-hidden": "true" }, "a"));
    many.disabled = !ids.length;
  };
  many.addEventListener("click", onAll);
  tell();
  let shown = Math.min(ids.length, Number(params.shown) || PAGE);
  const grid = h("ul", { class: "grid" }, ids.slice(0, shown).map((i) => gridTile(i, tell)));
  const more = h("button", { type: "button", class: "wide middle", onclick: () => {
    const next = ids.slice(shown, shown + PAGE);
    shown += next.length;
    grid.append(...next.map((i) => gridTile(i, tell)));
    replaceParams({ shown });
    sayMore();
    grid.children[shown - next.length].querySelector("a").focus();
  } });
  const sayMore = () => {
    more.hidden = shown >= ids.length;
    more.textContent = `Show ${number(Math.min(PAGE, ids.length - shown))} more of ${number(ids.length)}`;
  };
  sayMore();
  const label = params.label !== undefined && D.classes.length > MANY_CLASSES ? D.classes[Number(params.label)] : "";
  const filters = h("div", { class: "filters" }, classChoice("label", params), splitChoice(params),
    choice("found", params, [["", "any or none"], ...VIEWS.filter(({ count, absent }) => count && !absent).map(({ name, title }) => [name, title])], "Listed in"),
    choice("verdict", params, [["", "any or none"], ...Object.entries(MEANING), ["none", "none yet"]], "Verdict"),
    params.area ? chip("an area of the map", ["area", "shown"]) : null,
    label ? chip(label, ["label", "shown"]) : null,
    params.q ? chip(params.q, ["q", "shown"]) : null, many);
  return {
    nodes: [
      h("h2", {}, "Images"),
      h("p", { class: "lead" }, `${images(ids.length)}. Choose one to see its neighbours, or search with `, h("kbd", {}, "/"), "."),
      filters,
      ids.length ? grid : h("p", { class: "empty" }, "No image fits."),
      more,
    ],
    tiles: () => [...grid.querySelectorAll("a")],
    many: onAll,
    show: () => lookFrom(document.activeElement),
    choose: chooseInLook,
  };
}

function lookFrom(element) {  // the image that has the focus, beside its neighbours
  const link = element && element.closest("a[data-image]");
  if (link) lookAround(Number(link.dataset.image));
}
function lookAround(i, second) {
  const shares = sharesOf(i);
  lookAt({ ids: [i, ...shares.keys()], second, shares, heading: [text(labelOf(i) ? `${labelOf(i)} · ` : ""), text(shortName(i))] });
}
const chooseInLook = (id) => lookAround(looking.ids[0], id);

// ---- one image ----

function around(i) {
  if (!(i >= 0 && i < D.count)) {
    return { nodes: [h("h2", {}, "Images"), h("p", { class: "empty" }, "There is no image of that number.")] };
  }
  const own = labelOf(i);
  const link = fileLink(i);
  const entry = verdictOn(i);
  const others = othersOf(i);
  const theirs = listedBy(i);
  const shown = theirs.slice(0, 48);
  const unlisted = LISTED[i] ? `A neighbour of ${images(LISTED[i])}, but not among ${LISTED[i] === 1 ? "its" : "their"} ${D.support.width} best.`
    : i < D.remembered ? "Of no image: it is lonely." : "Of no image: the run's memory knows its training images alone.";
  const facts = [
    ["file", text(nameOf(i))],
    ["label", own ? h("a", { href: address("neighbours", { label: LABELS[i] }) }, text(own)) : "none"],
    ["split", splitOf(i)],
    ["size", sizeOf(i)],
    ["number", String(i)],
    ["matches itself", D.windowed ? (OWN[i] ? percent(OWN[i] / 65535) : "not at all") : "always (one view)"],
    ["neighbour of", images(LISTED[i])],
    ["verdict", entry ? MEANING[entry.verdict] + (entry.label ? `: ${entry.label}` : "") : "none yet"],
  ];
  const lists = VIEWS.filter((view) => view.count && !view.absent)
    .filter((view) => TABLES[view.name].rows.some((row) => row[0] === String(i)));
  const grid = (list, empty) => list.length
    ? h("ul", { class: "grid" }, list.map(({ id, p }) => h("li", {},
      tile(id, { p, most: Math.max(...list.map((one) => one.p)), differs: own && labelOf(id) !== own }))))
    : h("p", { class: "empty" }, empty);
  const decideOn = (verdict, words, label) => {
    decide(wholeChanges(i, verdict, label), { view: "neighbours", ids: [i] });
    say(words);
    render(true);
  };
  const judge = (place) => decideOn(...VERDICTS.lonely[place]);
  const label = labelChoice("right-label", "Wrong label; right is…");
  if (label) label.addEventListener("change", () => label.value && decideOn("relabel", `Wrong label; right is ${label.value}`, label.value));
  const enlarged = h("button", { type: "button", class: "enlarge", "aria-label": "Look closer", onclick: () => lookAround(i) }, picture(i, "large"));
  const box = h(
    "div",
    { class: "around" },
    h("div", { class: "query" }, enlarged,
      h("dl", { class: "details" }, facts.map(([what, value]) => h("div", {}, h("dt", {}, what), h("dd", {}, value)))),
      h("p", {}, link ? h("a", { href: link, target: "_blank", rel: "noopener" }, "Open the file") : null,
        lists.length ? h("span", { class: "listed" }, " Also in: ", lists.flatMap((view, n) =>
          [n ? ", " : "", h("a", { href: address(view.name, { only: i }) }, view.title)])) : null),
      verdictButtons("lonely", entry ? entry.verdict : null, judge), label),
    h("div", {}, h("h3", {}, "Its neighbours, the most likely first"),
      grid(others, "Nothing is known of this image: it could not be read, or has no features."),
      h("h3", {}, `Whose neighbour it is${shown.length && shown.length < LISTED[i] ? ` (${shown.length} of ${number(LISTED[i])})` : ""}`),
      grid(shown, unlisted)),
  );
  for (const tileLink of box.querySelectorAll(".tile")) tileLink.tabIndex = 0;
  return {
    nodes: [h("h2", {}, "Neighbours of ", text(shortName(i))), box],
    judge,
    tiles: () => [...box.querySelectorAll(".tile")],
    show: () => {
      const at = document.activeElement.closest("a[data-image]");
      lookAround(i, at && others.some(({ id }) => id === Number(at.dataset.image)) ? Number(at.dataset.image) : undefined);
    },
    choose: chooseInLook,
  };
}
