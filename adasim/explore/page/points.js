// All images as points in two dimensions: where they are, which colour they have, and how they are drawn. Points are
// written straight into the pixels of a canvas: 60,000 of them take some milliseconds, without any GPU.
const NOWHERE = 65535;
let places = null;  // {x, y}: (N,) from 0 to 1; -1 where an image has no place
function placesOf() {
  if (!places) {
    const packed = decode(D.map, Uint16Array);
    places = { x: new Float32Array(D.count), y: new Float32Array(D.count) };
    for (let i = 0; i < D.count; i++) {
      const known = packed[2 * i] !== NOWHERE;
      places.x[i] = known ? packed[2 * i] / 65534 : -1;
      places.y[i] = known ? packed[2 * i + 1] / 65534 : -1;
    }
  }
  return places;
}

// An area of the map, as the address has it: the corners of a box, or of a polygon.
function insideArea(area) {
  const c = area.split(",").map(Number);
  const { x, y } = placesOf();
  const xs = c.filter((_, n) => n % 2 === 0);
  const ys = c.filter((_, n) => n % 2);
  const [left, right, top, bottom] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const box = (i) => x[i] >= left && x[i] <= right && y[i] >= top && y[i] <= bottom;
  if (xs.length === 2) return box;
  return (i) => {
    if (!box(i)) return false;
    let inside = false;
    for (let a = 0, b = xs.length - 1; a < xs.length; b = a++) {
      if ((ys[a] > y[i]) !== (ys[b] > y[i]) && x[i] < ((xs[b] - xs[a]) * (y[i] - ys[a])) / (ys[b] - ys[a]) + xs[a]) inside = !inside;
    }
    return inside;
  };
}

// ---- colours ----

const PALETTE = ["#4269d0", "#e58606", "#3ca951", "#d83a4b", "#9a6324", "#8b5cd6", "#e377c2", "#0f9ba8", "#b5a100", "#6b7280",
  "#97bbf5", "#0b6e4f"];
const GREY = "#9aa0a8";
const classColour = (c) => (D.classes.length <= PALETTE.length ? PALETTE[c] : `hsl(${(c * 137.5) % 360} 60% ${c % 2 ? 58 : 45}%)`);

// What the points may be coloured by: keys in words and colours, and of(i), the key of an image (-1: none).
function colourings() {
  const lists = VIEWS.filter(({ count, absent }) => count && !absent);
  const sets = lists.map(({ name }) => findingsOf(name));
  const meanings = Object.keys(MEANING);
  return {
    ...(LABELS ? { label: { title: "label", keys: D.classes.map((name, c) => [name, classColour(c)]), of: (i) => LABELS[i], link: (k) => ({ label: k }) } } : {}),
    finding: { title: "finding", keys: lists.map(({ title }, k) => [title, ["#4269d0", "#d83a4b", "#e58606", "#8b5cd6"][k]]),
      of: (i) => sets.findIndex((set) => set.has(i)), link: (k) => ({ found: lists[k].name }) },
    verdict: { title: "verdict", keys: meanings.map((name, k) => [MEANING[name], ["#d83a4b", "#4269d0", "#e58606", "#3ca951"][k]]),
      of: (i) => meanings.indexOf(verdictName(i)), link: (k) => ({ verdict: meanings[k] }) },
    ...(D.splits.length > 1 ? { split: { title: "split", keys: D.splits.map((name, k) => [name, PALETTE[k]]), of: (i) => (i < D.train ? 0 : 1), link: (k) => ({ split: D.splits[k] }) } } : {}),
  };
}

const pixels = new Map();
function pixelOf(colour) {  // any CSS colour as [r, g, b]
  if (!pixels.has(colour)) {
    const context = h("canvas", { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true });
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    pixels.set(colour, [...context.getImageData(0, 0, 1, 1).data]);
  }
  return pixels.get(colour);
}

// ---- drawing ----

const disks = new Map();
function diskOf(radius) {  // triples: the offset of each pixel of a disk, and how much of it is covered, of 256
  const key = Math.round(radius * 4);
  if (!disks.has(key)) {
    const r = Math.max(0.75, key / 4);
    const reach = Math.min(EDGE - 1, Math.ceil(r));
    const found = [];
    for (let dy = -reach; dy <= reach; dy++) {
      for (let dx = -reach; dx <= reach; dx++) {
        const cover = Math.min(1, Math.max(0, r + 0.5 - Math.hypot(dx, dy)));
        if (cover > 0.05) found.push(dx, dy, Math.round(cover * 256));
      }
    }
    disks.set(key, Int16Array.from(found));
  }
  return disks.get(key);
}
const EDGE = 16;  // pixels at the border where no disk begins, so that none needs to be cut

// layers: [[ids, disk], ...], the topmost last; (scale, left, top): from places to pixels; ink: colours by id
function drawPoints(canvas, layers, { scale, left, top }, ink) {
  const { width, height } = canvas;
  if (!canvas.image || canvas.image.width !== width || canvas.image.height !== height) canvas.image = new ImageData(width, height);
  const out = new Uint32Array(canvas.image.data.buffer);
  out.fill(0);
  const { x, y } = placesOf();
  for (const [ids, disk] of layers) for (const i of ids) {
    const px = Math.round(x[i] * scale + left);
    const py = Math.round(y[i] * scale + top);
    if (px < EDGE || py < EDGE || px >= width - EDGE || py >= height - EDGE) continue;
    const colour = ink[i];
    for (let n = 0; n < disk.length; n += 3) {
      const at = (py + disk[n + 1]) * width + px + disk[n];
      const cover = disk[n + 2];
      const below = out[at];
      if (cover >= 250) out[at] = 0xff000000 | colour;
      else if (!below) out[at] = (cover << 24) | colour;
      else {  // red and blue in one product, green in another
        const rest = 256 - cover;
        const outer = ((below & 0xff00ff) * rest + (colour & 0xff00ff) * cover) >>> 8;
        const green = ((below & 0xff00) * rest + (colour & 0xff00) * cover) >>> 8;
        out[at] = (Math.max(below >>> 24, cover) << 24) | (outer & 0xff00ff) | (green & 0xff00);
      }
    }
  }
  canvas.getContext("2d").putImageData(canvas.image, 0, 0);
}

// Thumbnails on a canvas: a sheet is fetched and decoded when it is first needed; ready() is then called.
const sheets = new Map();
function drawPicture(context, i, x, y, side, ready) {
  const { columns, tile: size } = D.sheets;
  const sheet = Math.floor(i / columns ** 2);
  if (!sheets.has(sheet)) {
    if (sheets.size > 400) sheets.clear();
    const entry = { image: new Image(), done: false };
    sheets.set(sheet, entry);
    entry.image.src = sheetUrl(sheet);
    entry.image.decode().then(() => { entry.done = true; ready(); }, () => {});
  }
  const { image, done } = sheets.get(sheet);
  if (!done || !WIDTHS[i]) return;
  const place = i % columns ** 2;
  context.drawImage(image, (place % columns) * size, Math.floor(place / columns) * size, size, size, x, y, side, side);
}
