// Neighbours: all images to choose from, or one image with its support and with those that have it in theirs.
const PAGE = 240;

function neighboursView(params) {
  return params.image === undefined ? browse(params) : around(Number(params.image), params);
}

function browse(params) {
  const label = params.label === undefined ? -1 : Number(params.label);
  const words = (params.q || "").toLowerCase().split(/\s+/).filter(Boolean);
  const ids = [];
  for (let i = 0; i < D.count; i++) {
    if ((label < 0 || LABELS[i] === label) && words.every((word) => found(i, word))) ids.push(i);
  }
  const shown = Math.min(ids.length, Number(params.shown) || PAGE);
  const more = ids.length > shown
    ? h("button", { type: "button", class: "wide", onclick: () => go("neighbours", { ...params, shown: shown + PAGE }, true) },
      `Show ${number(Math.min(PAGE, ids.length - shown))} more of ${number(ids.length)}`) : null;
  const grid = h("ul", { class: "grid" }, ids.slice(0, shown).map((i) => h("li", {}, tile(i))));
  for (const link of grid.querySelectorAll("a")) link.tabIndex = 0;
  return {
    nodes: [
      h("h2", {}, "Neighbours"),
      h("p", { class: "lead" }, `${number(ids.length)} images. Choose one, or search with `, h("kbd", {}, "/"), "."),
      label >= 0 || words.length ? h("div", { class: "filters" },
        chip([label >= 0 ? D.classes[label] : "", params.q || ""].filter(Boolean).join(", "), ["label", "q", "shown"])) : null,
      ids.length ? grid : h("p", { class: "empty" }, "No image fits."),
      more,
    ].filter(Boolean),
    tiles: () => [...grid.querySelectorAll("a")],
  };
}

function around(i) {
  if (!(i >= 0 && i < D.count)) {
    return { nodes: [h("h2", {}, "Neighbours"), h("p", { class: "empty" }, "There is no image of that number.")] };
  }
  const own = labelOf(i);
  const link = fileLink(i);
  const entry = verdictOn(i);
  const support = supportOf(i);
  const theirs = listedBy(i);
  const shown = theirs.slice(0, 48);
  const unlisted = LISTED[i] ? `In the support of ${images(LISTED[i])}, but not among ${LISTED[i] === 1 ? "its" : "their"} ${D.support.width} best.`
    : i < D.remembered ? "In nobody's: it is lonely." : "In nobody's: the run's memory knows its training images alone.";
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
  const found = VIEWS.filter((view) => view.count && !view.absent)
    .filter((view) => TABLES[view.name].rows.some((row) => row[0] === String(i)));
  const grid = (list, empty) => list.length
    ? h("ul", { class: "grid" }, list.map(({ id, p }) => h("li", {},
      tile(id, { p, most: Math.max(...list.map((one) => one.p)), own: id === i, differs: own && labelOf(id) !== own }))))
    : h("p", { class: "empty" }, empty);
  const nodes = [
    h("h2", {}, "Neighbours of ", text(shortName(i))),
    h(
      "div",
      { class: "around" },
      h("div", { class: "query" }, picture(i, "large"),
        h("dl", { class: "details" }, facts.map(([what, value]) => h("div", {}, h("dt", {}, what), h("dd", {}, value)))),
        h("p", {}, link ? h("a", { href: link, target: "_blank", rel: "noopener" }, "Open the file") : null,
          found.length ? h("span", { class: "listed" }, " Also in: ", found.flatMap((view, n) =>
            [n ? ", " : "", h("a", { href: address(view.name, { only: i }) }, view.title)])) : null),
        h("div", { class: "verdicts", role: "group", "aria-label": "Verdict" },
          VERDICTS.lonely.map(([verdict, words], place) => h("button", {
            type: "button", class: verdict, "aria-pressed": String(Boolean(entry) && entry.verdict === verdict),
            "aria-keyshortcuts": place + 1, onclick: () => judge(place) },
          h("kbd", { "aria-hidden": "true" }, place + 1), ` ${words}`)))),
      h("div", {}, h("h3", {}, "Its support, the most likely first"),
        grid(support, "Nothing is known of this image: it could not be read, or was never seen."),
        h("h3", {}, `In whose support it stands${shown.length && shown.length < LISTED[i] ? ` (${shown.length} of ${number(LISTED[i])})` : ""}`),
        grid(shown, unlisted)),
    ),
  ];
  const judge = (place) => {
    const [verdict, words] = VERDICTS.lonely[place];
    const said = { verdict, view: "neighbours" };  // of the image as a whole: what weighs more is taken back
    const back = entriesOf(i).filter((one) => rank(one) < rank(said)).map(({ view }) => [i, { verdict: null, view }]);
    decide([...back, [i, said]], { view: "neighbours", ids: [i] });
    say(words);
    render(true);
  };
  const box = nodes[1];
  for (const tileLink of box.querySelectorAll(".tile")) tileLink.tabIndex = 0;
  return { nodes, judge, tiles: () => [...box.querySelectorAll(".tile")] };
}
