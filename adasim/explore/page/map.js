// The map: pan, zoom, look, select. What is selected is an area, which the address holds; the lists below the map lead to
// the same images for those who use a keyboard or do not see it.
const FEW = 160;          // as few images in view are shown as pictures
const CELL = 36;          // pixels of a picture, at least
const mixed = (i) => Math.imul(i + 1, 2654435761) >>> 0;  // an order in which no class comes first

function mapView(params) {
  const { x, y } = placesOf();
  const kinds = colourings();
  const by = kinds[params.by] ? params.by : Object.keys(kinds)[0];
  const kind = kinds[by];
  const picked = params.pick === undefined ? -1 : Number(params.pick);  // a key of the legend, alone
  const keyOf = Int32Array.from({ length: D.count }, (_, i) => kind.of(i));
  const lit = (i) => (picked < 0 ? keyOf[i] >= 0 || by === "label" : keyOf[i] === picked);
  const order = [...Array(D.count).keys()].filter((i) => x[i] >= 0);
  const dim = order.filter((i) => !lit(i));
  const bright = order.filter(lit);
  const ink = new Uint32Array(D.count);
  const grey = pixelOf(getComputedStyle(document.documentElement).getPropertyValue("--dim").trim() || GREY);
  const colours = kind.keys.map(([, colour]) => pixelOf(colour));
  for (const i of order) {
    const [r, g, b] = lit(i) && keyOf[i] >= 0 ? colours[keyOf[i]] : grey;
    ink[i] = r | (g << 8) | (b << 16);
  }

  // ---- the view: its middle in places, and pixels per unit
  let [cx, cy, zoom] = (params.view || "").split(",").map(Number);
  if (!(zoom >= 0.5)) [cx, cy, zoom] = [0.5, 0.5, 1];
  let tool = params.tool || "pan";
  let pictures = params.pictures === "1";
  let area = params.area || "";
  let selected = [];
  let hovered = -1;
  let drawn = null;      // the box or lasso in the making, in places
  let cells = new Map(); // pictures that are shown, by cell
  const points = h("canvas", { class: "points", "aria-hidden": "true" });
  const over = h("canvas", { class: "over", tabindex: "0", role: "application", "aria-roledescription": "map", id: "map",
    "aria-label": `Map of ${images(order.length)}. Arrow keys move it, plus and minus zoom, 0 shows all, Enter selects what is in view. ` +
      "The regions below list the same images." });
  const tip = h("div", { class: "tip", hidden: true, "aria-hidden": "true" });
  const stage = h("div", { class: "stage" }, points, over, tip);
  const ratio = () => Math.min(2, devicePixelRatio || 1);
  const size = () => [stage.clientWidth, stage.clientHeight];
  const [boundLeft, boundTop, boundRight, boundBottom] = boundsOf(order);
  const whole = [Math.max(0.05, boundRight - boundLeft), Math.max(0.05, boundBottom - boundTop)];
  const scale = () => zoom * 0.94 * Math.min(size()[0] / whole[0], size()[1] / whole[1]);
  const toX = (value) => (value - cx) * scale() + size()[0] / 2;
  const toY = (value) => (value - cy) * scale() + size()[1] / 2;
  const fromX = (px) => (px - size()[0] / 2) / scale() + cx;
  const fromY = (py) => (py - size()[1] / 2) / scale() + cy;
  const inView = () => {
    const [left, top, right, bottom] = [fromX(0), fromY(0), fromX(size()[0]), fromY(size()[1])];
    return (i) => x[i] >= left && x[i] <= right && y[i] >= top && y[i] <= bottom;
  };

  let frame = 0;
  const later = () => { if (!frame) frame = requestAnimationFrame(() => { frame = 0; draw(); }); };
  function draw() {
    const [width, height] = size();
    if (!width || !stage.isConnected) return;
    const dpr = ratio();
    for (const canvas of [points, over]) {
      if (canvas.width !== Math.round(width * dpr) || canvas.height !== Math.round(height * dpr)) {
        canvas.width = Math.round(width * dpr);
        canvas.height = Math.round(height * dpr);
      }
    }
    const s = scale();
    const view = { scale: s * dpr, left: (width / 2 - cx * s) * dpr, top: (height / 2 - cy * s) * dpr };
    const radius = Math.min(6, Math.max(1.1, 0.24 * Math.sqrt((width * height) / Math.max(1, order.length)) * zoom ** 0.4));
    const [small, normal] = [diskOf(radius * 0.8 * dpr), diskOf((dim.length > bright.length ? 1.35 : 1) * radius * dpr)];
    drawPoints(points, pictures ? [] : [[dim, small], [bright, normal]], view, ink);
    const context = over.getContext("2d");
    context.setTransform(dpr, 0, 0, dpr, 0, 0);
    context.clearRect(0, 0, width, height);
    cells = new Map();
    const visible = (picked < 0 ? order : bright).filter(inView());
    if (pictures || visible.length <= FEW) drawPictures(context, visible, s);
    drawArea(context);
    if (hovered >= 0 && !cells.size) {
      context.strokeStyle = getComputedStyle(stage).color;
      context.lineWidth = 2;
      context.beginPath();
      context.arc(toX(x[hovered]), toY(y[hovered]), radius + 4, 0, 7);
      context.stroke();
    }
  }

  function drawPictures(context, visible, s) {  // one in each cell of a grid that stays where it is when the map moves
    const side = 2 ** Math.ceil(Math.log2(CELL / s));
    for (const i of visible) {
      const key = `${Math.floor(x[i] / side)},${Math.floor(y[i] / side)}`;
      const other = cells.get(key);
      if (other === undefined || lit(i) > lit(other) || (lit(i) === lit(other) && mixed(i) < mixed(other))) cells.set(key, i);
    }
    cells.side = side;
    const px = side * s;
    context.imageSmoothingEnabled = D.sheets.tile > 48;
    for (const [key, i] of cells) {
      const [a, b] = key.split(",").map(Number);
      const [left, top, frameWidth] = [toX(a * side) + 1, toY(b * side) + 1, Math.max(2, px / 26)];
      const [r, g, blue] = lit(i) && keyOf[i] >= 0 ? colours[keyOf[i]] : grey;
      context.fillStyle = `rgb(${r} ${g} ${blue})`;
      context.fillRect(left, top, px - 2, px - 2);
      drawPicture(context, i, left + frameWidth, top + frameWidth, px - 2 - 2 * frameWidth, later);
      if (i === hovered) {
        context.strokeStyle = getComputedStyle(stage).color;
        context.lineWidth = 3;
        context.strokeRect(left, top, px - 2, px - 2);
      }
    }
  }

  function drawArea(context) {
    const corners = drawn || (area ? area.split(",").map(Number) : []);
    if (corners.length < 4) return;
    const outline = corners.length === 4 ? [corners[0], corners[1], corners[2], corners[1], corners[2], corners[3], corners[0], corners[3]] : corners;
    context.beginPath();
    for (let n = 0; n < outline.length; n += 2) context.lineTo(toX(outline[n]), toY(outline[n + 1]));
    context.closePath();
    const accent = getComputedStyle(document.documentElement).getPropertyValue("--accent");
    context.strokeStyle = accent;
    context.lineWidth = 2;
    context.globalAlpha = 0.12;
    context.fillStyle = accent;
    context.fill();
    context.globalAlpha = 1;
    context.stroke();
  }

  // ---- moving
  let settling = 0;
  function settle() {  // the address and the lists follow when the map rests
    clearTimeout(settling);
    settling = setTimeout(() => {
      if (!stage.isConnected) return;
      const still = cx === 0.5 && cy === 0.5 && zoom === 1;
      replaceParams({ view: still ? undefined : [cx.toFixed(4), cy.toFixed(4), zoom.toFixed(3)].join(",") });
      tellRegions();
    }, 250);
  }
  function moveBy(dx, dy) { cx -= dx / scale(); cy -= dy / scale(); later(); settle(); }
  function zoomBy(factor, px = size()[0] / 2, py = size()[1] / 2) {
    const [ax, ay] = [fromX(px), fromY(py)];
    zoom = Math.min(400, Math.max(0.5, zoom * factor));
    cx += ax - fromX(px);
    cy += ay - fromY(py);
    later();
    settle();
  }
  function showBox(left, top, right, bottom) {
    const [width, height] = size();
    [cx, cy] = [(left + right) / 2, (top + bottom) / 2];
    zoom = Math.min(400, (zoom / scale()) * 0.9 * Math.min(width / Math.max(1e-4, right - left), height / Math.max(1e-4, bottom - top)));
    later();
    settle();
  }
  const showAll = () => { [cx, cy, zoom] = [0.5, 0.5, 1]; later(); settle(); };

  // ---- looking
  function nearest(px, py) {
    if (cells.size) return cells.get(`${Math.floor(fromX(px) / cells.side)},${Math.floor(fromY(py) / cells.side)}`) ?? -1;
    const s = scale();
    let [best, least] = [-1, 14 / s];
    const [ax, ay] = [fromX(px), fromY(py)];
    for (const i of picked < 0 ? order : bright) {
      const distance = Math.hypot(x[i] - ax, y[i] - ay);
      if (distance < least) [best, least] = [i, distance];
    }
    return best;
  }
  function hover(px, py) {
    const i = px === undefined ? -1 : nearest(px, py);
    if (i !== hovered) {
      hovered = i;
      over.style.cursor = i >= 0 && tool === "pan" ? "pointer" : "";
      tip.hidden = i < 0;
      const entry = i >= 0 && verdictOn(i);
      if (i >= 0) tip.replaceChildren(picture(i), h("b", {}, text(labelOf(i) || shortName(i))), h("span", {}, text(nameOf(i))),
        entry ? h("span", {}, MEANING[entry.verdict]) : "");
      later();
    }
    if (i < 0) return;
    const [width, height] = size();
    tip.style.left = `${Math.min(px + 18, width - 170)}px`;
    tip.style.top = `${py + 230 > height ? Math.max(0, py - 225) : py + 14}px`;
  }

  // ---- selecting
  function select(corners) {
    area = corners.map((value) => value.toFixed(4)).join(",");
    replaceParams({ area: area || undefined });
    tellSelection();
    later();
  }
  const selection = h("div", { class: "selection", id: "selection", role: "status" });
  function tellSelection() {
    const inside = area ? insideArea(area) : () => false;
    selected = (picked < 0 ? order : bright).filter(inside);
    if (!area) return selection.replaceChildren(h("p", {}, "Nothing is selected. Draw a box (Shift and drag) or a lasso, choose a region below, or press Enter for what is in view."));
    const filter = { area, ...(picked < 0 ? {} : kind.link(picked)) };
    selection.replaceChildren(
      h("p", {}, h("b", {}, `${images(selected.length)} selected`), " ", describe(selected)),
      h("div", { class: "few" }, spread(selected, 16).map((i) => picture(i))),
      h("div", { class: "actions" },
        h("a", { class: "button", id: "as-list", href: address("neighbours", filter) }, "Show as a list"),
        h("button", { type: "button", class: "wide", id: "judge-selected", "aria-haspopup": "dialog", disabled: !selected.length,
          onclick: () => judgeImages(selected, "All images that are selected on the map.", () => render(true)) }, `Verdict for all ${number(selected.length)}…`),
        h("button", { type: "button", class: "wide", onclick: () => select([]) }, "Clear")),
    );
  }

  let pointers = new Map();
  let start = null;
  over.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    over.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, [event.offsetX, event.offsetY]);
    const way = event.shiftKey ? "box" : tool;
    start = { x: event.offsetX, y: event.offsetY, way, moved: false };
    drawn = way === "pan" || pointers.size > 1 ? null : [fromX(start.x), fromY(start.y)];
  });
  over.addEventListener("pointermove", (event) => {
    const before = pointers.get(event.pointerId);
    if (!before) return event.pointerType === "mouse" && hover(event.offsetX, event.offsetY);
    const now = [event.offsetX, event.offsetY];
    if (pointers.size === 2) {  // two fingers: zoom
      const [other] = [...pointers.entries()].filter(([id]) => id !== event.pointerId).map(([, place]) => place);
      const apart = (place) => Math.hypot(place[0] - other[0], place[1] - other[1]);
      zoomBy(apart(now) / Math.max(1, apart(before)), other[0], other[1]);
      drawn = null;
      start.moved = true;
    } else if (start.way === "pan") {
      start.moved ||= Math.hypot(now[0] - start.x, now[1] - start.y) > 4;
      if (start.moved) moveBy(now[0] - before[0], now[1] - before[1]);
    } else if (drawn) {
      start.moved = true;
      const place = [fromX(now[0]), fromY(now[1])];
      if (start.way === "box") drawn = [drawn[0], drawn[1], ...place];
      else if (Math.hypot(toX(drawn.at(-2)) - now[0], toY(drawn.at(-1)) - now[1]) > 7) drawn.push(...place);
      later();
    }
    pointers.set(event.pointerId, now);
    hover();
  });
  const release = (event) => {
    pointers.delete(event.pointerId);
    if (!start || pointers.size) return;
    const { moved, way } = start;
    start = null;
    if (drawn && moved && drawn.length >= (way === "box" ? 4 : 6)) select(drawn);
    drawn = null;
    later();
    if (event.type === "pointerup" && !moved) {
      const i = nearest(event.offsetX, event.offsetY);
      if (i >= 0) lookAround(i);
    }
  };
  over.addEventListener("pointerup", release);
  over.addEventListener("pointercancel", release);
  over.addEventListener("pointerleave", () => hover());
  over.addEventListener("wheel", (event) => {
    event.preventDefault();
    zoomBy(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0016)), event.offsetX, event.offsetY);
  }, { passive: false });
  over.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60] }[event.key];
    if (step) moveBy(...step);
    else if (event.key === "+" || event.key === "=") zoomBy(1.4);
    else if (event.key === "-") zoomBy(1 / 1.4);
    else if (event.key === "0") showAll();
    else if (event.key === "Enter") select([fromX(0), fromY(0), fromX(size()[0]), fromY(size()[1])]);
    else if (event.key === "Escape") select([]);
    else return;
    event.preventDefault();
  });

  // ---- the same as lists: what is in view, halved again and again
  const regions = h("ul", { class: "regions", id: "regions" });
  function tellRegions() {
    const boxes = halve((picked < 0 ? order : bright).filter(inView()), REGIONS);
    regions.replaceChildren(...boxes.map((ids) => {
      const [left, top, right, bottom] = boundsOf(ids);
      const box = [left, top, right, bottom].map((value, n) => (value + (n < 2 ? -5e-5 : 5e-5)).toFixed(4)).join(",");
      return h("li", {},
        h("div", { class: "few" }, spread(ids, 4).map((i) => picture(i))),
        h("a", { href: address("neighbours", { area: box, ...(picked < 0 ? {} : kind.link(picked)) }) }, images(ids.length)),
        h("p", {}, describe(ids)),
        h("button", { type: "button", onclick: () => { showBox(left, top, right, bottom); over.focus(); } }, "Zoom here"));
    }));
  }

  const set = (changes) => go("map", { ...route.params, ...changes }, true);
  const tools = h("div", { class: "segments", role: "group", "aria-label": "What dragging does" },
    [["pan", "Move"], ["box", "Box"], ["lasso", "Lasso"]].map(([name, words]) => h("button", {
      type: "button", "aria-pressed": String(tool === name), "data-tool": name, onclick: () => {
        tool = name;
        over.dataset.tool = name;
        replaceParams({ tool: name === "pan" ? undefined : name });
        for (const button of tools.children) button.setAttribute("aria-pressed", String(button.dataset.tool === name));
      } }, words)));
  over.dataset.tool = tool;
  const shown = h("input", { type: "checkbox", id: "pictures", checked: pictures, onchange: () => {
    pictures = shown.checked;
    replaceParams({ pictures: pictures ? "1" : undefined });
    later();
  } });
  const counts = kind.keys.map(() => 0);
  for (const i of order) if (keyOf[i] >= 0) counts[keyOf[i]]++;
  const keys = kind.keys.map(([name, colour], k) => [name, colour, k]).sort((a, b) => counts[b[2]] - counts[a[2]]).slice(0, 40);
  const legend = h("ul", { class: "legend", "aria-label": `Colours: ${kind.title}` }, keys.map(([name, colour, k]) => h("li", {},
    h("button", { type: "button", "aria-pressed": String(picked === k), onclick: () => set({ pick: picked === k ? undefined : k }) },
      h("span", { class: "dot", style: { background: colour } }), text(name), h("span", { class: "share" }, number(counts[k]))))),
  kind.keys.length > keys.length ? h("li", {}, `and ${number(kind.keys.length - keys.length)} more`) : null);
  const missing = D.count - order.length;
  const watch = new ResizeObserver(later);
  watch.observe(stage);
  tellSelection();
  return {
    nodes: [
      h("h2", {}, "Map"),
      h("p", { class: "lead" }, "Every image is a point, and images that look alike to the encoder lie close together. Distances between far groups mean little.",
        missing ? ` ${images(missing)} without features ${missing === 1 ? "has" : "have"} no place.` : ""),
      h("div", { class: "filters" },
        choice("by", { by }, Object.entries(kinds).map(([name, { title }]) => [name, title]), "Colour by"), tools,
        h("label", { for: "pictures" }, shown, " Pictures"),
        h("div", { class: "segments" },
          h("button", { type: "button", "aria-label": "Zoom in", onclick: () => zoomBy(1.6) }, "+"),
          h("button", { type: "button", "aria-label": "Zoom out", onclick: () => zoomBy(1 / 1.6) }, "−"),
          h("button", { type: "button", onclick: showAll }, "All"))),
      h("div", { class: "map" }, stage, h("div", {}, legend, selection)),
      h("h3", { class: "heading" }, "Regions in view"),
      regions,
    ],
    start: () => { draw(); tellRegions(); },
    stop: () => { watch.disconnect(); cancelAnimationFrame(frame); clearTimeout(settling); },
    choose: chooseInLook,
  };
}
