// Overview: what is in the data, and how much each hunt found.
function overview() {
  const facts = [
    [number(D.count), D.count === 1 ? "image" : "images"],
    ...(D.splits.length > 1 ? [[`${number(D.train)} + ${number(D.count - D.train)}`, D.splits.join(" + ")]] : []),
    [D.classes.length ? number(D.classes.length) : "none", D.classes.length === 1 ? "class" : "classes"],
    [D.sizes.text, "pixels"],
    ...(D.unreadable ? [[number(D.unreadable), "cannot be read"]] : []),
  ];
  const hunts = VIEWS.filter((view) => view.count).map((view) =>
    h(
      "li",
      {},
      h(
        "a",
        { class: "hunt", href: address(view.name) },
        h("span", { class: "figure" }, view.absent ? "–" : number(view.count())),
        h("span", { class: "what" }, view.title),
        h("span", { class: "why" }, view.absent ? "no labels" : view.about()),
      ),
    ),
  );
  return [
    h("h2", {}, "Overview"),
    h("p", { class: "lead" }, "Neighbours from ", text(D.origin), "."),
    h("dl", { class: "facts" }, facts.map(([value, what]) => h("div", {}, h("dt", {}, what), h("dd", {}, value)))),
    h("ul", { class: "hunts" }, hunts),
    h("div", { class: "panels" }, h("div", {}, confusionPanel(), classesPanel()), h("div", {}, mapPanel(), histogramPanel())),
  ];
}

function mapPanel() {
  const canvas = h("canvas", { class: "small-map", width: 640, height: 420, "aria-hidden": "true" });
  requestAnimationFrame(() => setTimeout(() => {  // after the rest of the page is there
    const { x } = placesOf();
    const ids = [...Array(D.count).keys()].filter((i) => x[i] >= 0);
    const ink = Uint32Array.from({ length: D.count }, (_, i) => {
      const [r, g, b] = pixelOf(LABELS && LABELS[i] >= 0 ? classColour(LABELS[i]) : PALETTE[0]);
      return r | (g << 8) | (b << 16);
    });
    const [left, top, right, bottom] = boundsOf(ids);
    const scale = Math.min(590 / Math.max(0.05, right - left), 370 / Math.max(0.05, bottom - top));
    drawPoints(canvas, [[ids, diskOf(D.count > 10000 ? 1 : 1.8)]], { scale, left: 320 - (scale * (left + right)) / 2, top: 210 - (scale * (top + bottom)) / 2 }, ink);
  }));
  return panel("Map", h("a", { href: address("map"), class: "to-map" }, canvas, "Open the map"));
}

const panel = (heading, ...children) => h("section", { class: "panel" }, h("h3", {}, heading), ...children);

function confusionPanel() {
  if (!LABELS) {
    return panel("Class confusion", h("p", {}, "There are no labels, so there is nothing to confuse. Sort the images " +
      "into one folder per class and this becomes a table of which class is taken for which."));
  }
  const count = D.classes.length;
  const cells = new Map(D.confusion.map(([a, b, mass]) => [a * count + b, mass]));
  const apart = D.confusion.filter(([a, b]) => a !== b).sort((x, y) => y[2] - x[2]);
  const most = Math.max(0.001, apart.length ? apart[0][2] : 0);
  const link = (a, b, mass, label, more = {}) =>
    h("a", { href: address("wrong-labels", { from: a, to: b }), "aria-label":
      `${percent(mass)} of the neighbours of ${D.classes[a]} are ${D.classes[b]}: show the suspects`, ...more }, label);
  if (count > 24) {
    return panel(
      "Class confusion",
      h("p", {}, "Classes whose images have neighbours of another class; the strongest first."),
      h("ol", { class: "ranks" }, apart.slice(0, 24).map(([a, b, mass]) =>
        h("li", {}, link(a, b, mass, [text(`${D.classes[a]} → ${D.classes[b]}`)]), bar(mass / most), percent(mass)))),
    );
  }
  let first = true;
  const rows = D.classes.map((name, a) =>
    h("tr", {}, h("th", { scope: "row" }, text(name)), D.classes.map((_, b) => {
      const mass = cells.get(a * count + b) || 0;
      if (a === b) return h("td", { class: "diagonal" }, percent(mass));
      const cell = h("td", { style: { "--heat": `${Math.round((55 * mass) / most)}%` } });
      cell.append(link(a, b, mass, mass ? percent(mass) : "·", { tabindex: first ? "0" : "-1" }));
      first = false;
      return cell;
    })));
  const table = h(
    "table",
    { class: "matrix", onkeydown: moveWithin },
    h("caption", { class: "hidden" }, "Rows: the label. Columns: the share of its images' neighbours with each label."),
    h("thead", {}, h("tr", {}, h("td", {}, "label ↓  neighbours →"),
      D.classes.map((name) => h("th", { scope: "col" }, text(name))))),
    h("tbody", {}, rows),
  );
  return panel(
    "Class confusion",
    h("p", {}, "Which labels the neighbours of a class have, on average. Choose a cell to see the suspects."),
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Class confusion" }, table),
  );
}

function moveWithin(event) {  // arrow keys from cell to cell; one stop for Tab
  const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
  const cell = event.target.closest("td");
  if (!step || !cell) return;
  event.preventDefault();
  const table = event.currentTarget;
  let [row, column] = [cell.parentNode.rowIndex, cell.cellIndex];
  for (;;) {
    row += step[0];
    column += step[1];
    const next = table.rows[row] && table.rows[row].cells[column];
    if (!next) return;
    const link = next.querySelector("a");
    if (link) {
      event.target.tabIndex = -1;
      link.tabIndex = 0;
      link.focus();
      return;
    }
  }
}

function histogramPanel() {
  const heading = "How often an image is its own match";
  if (!D.windowed) {
    return panel(heading, h("p", {}, "The features hold one view of each image, and an image is always closest to " +
      "itself. A run, or an encoder with augmented passes, can say more."));
  }
  const { counts, top, mean } = D.selfMatch;
  const most = Math.max(1, ...counts);
  const [width, height, gap] = [400, 110, 2];
  const step = width / counts.length;
  const bars = counts.map((count, n) => {
    const tall = (count / most) * height;
    return svg("rect", { x: n * step + gap / 2, y: height - tall, width: step - gap, height: tall, rx: 1.5 });
  });
  const words = `On average an image matches itself with a probability of ${percent(mean)}.`;
  return panel(
    heading,
    svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "histogram", role: "img", "aria-label": words }, ...bars),
    h("p", { class: "axis", "aria-hidden": "true" }, h("span", {}, "0"), h("span", {}, "self-match probability"),
      h("span", {}, percent(top))),
    h("p", {}, words),
  );
}

function classesPanel() {
  const rows = [];
  if (LABELS) {
    const counts = new Array(D.classes.length).fill(0);
    for (const label of LABELS) if (label >= 0) counts[label]++;
    const order = counts.map((_, c) => c).sort((a, b) => counts[b] - counts[a]).slice(0, 24);
    for (const c of order) {
      rows.push(h("li", {}, h("a", { href: address("neighbours", { label: c }) }, text(D.classes[c])),
        bar(counts[c] / counts[order[0]]), number(counts[c])));
    }
  }
  const sizes = D.sizes.common.map(([size, count]) => h("li", {}, h("span", {}, size),
    bar(count / D.sizes.common[0][1]), number(count)));
  return panel(
    LABELS ? "Images per class" : "Sizes",
    LABELS ? h("ol", { class: "ranks" }, rows) : null,
    LABELS ? h("h3", {}, "Sizes") : null,
    h("ol", { class: "ranks" }, sizes),
  );
}
