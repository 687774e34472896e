// What Python found, decoded. Names and labels are other people's text: they only ever reach the page as text nodes.
const D = JSON.parse(document.getElementById("data").textContent);

function decode(base64, Type) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return new Type(bytes.buffer);
}

const IDS = decode(D.support.ids, Int32Array);      // (N, S): neighbours; -1 is padding
const P = decode(D.support.p, Uint16Array);         // (N, S): their probabilities, in parts of 65,535
const LISTED = decode(D.listed, Uint32Array);       // (N,): how many other images have it as a neighbour
const OWN = decode(D.own, Uint16Array);             // (N,): the probability of the image itself, in parts of 65,535
const LABELS = D.labels ? decode(D.labels, Int32Array) : null;
const HEIGHTS = decode(D.heights, Uint32Array);
const WIDTHS = decode(D.widths, Uint32Array);

const nameOf = (i) => D.names[i];
const splitOf = (i) => D.splits[i < D.train ? 0 : 1];
const labelOf = (i) => (LABELS && LABELS[i] >= 0 ? D.classes[LABELS[i]] : "");
const sizeOf = (i) => (WIDTHS[i] ? `${WIDTHS[i]} × ${HEIGHTS[i]}` : "unreadable");
const percent = (p) => (p > 0 && p < 0.01 ? "<1%" : `${Math.round(100 * p)}%`);
const number = (n) => n.toLocaleString("en-US");
const counted = (n, one, many = `${one}s`) => `${number(n)} ${n === 1 ? one : many}`;
const images = (n) => counted(n, "image");
const shortName = (i) => nameOf(i).split("/").pop();

function supportOf(i) {
  const found = [];
  for (let s = i * D.support.width; s < (i + 1) * D.support.width && IDS[s] >= 0; s++) {
    found.push({ id: IDS[s], p: P[s] / 65535 });
  }
  return found;
}

// The neighbours without the image itself, with their shares among all of its neighbours.
function othersOf(i) {
  const others = supportOf(i).filter(({ id }) => id !== i);
  const whole = Math.max(1e-9, 1 - OWN[i] / 65535, others.reduce((sum, { p }) => sum + p, 0));
  return others.map(({ id, p }) => ({ id, p: p / whole }));
}

let reverse = null;
function listedBy(i) {  // who has image i among its best that are here, the most likely first; LISTED counts all
  if (!reverse) {
    reverse = new Map();
    for (let n = 0; n < D.count; n++) {
      for (const { id, p } of supportOf(n)) {
        if (id === n) continue;
        if (!reverse.has(id)) reverse.set(id, []);
        reverse.get(id).push({ id: n, p });
      }
    }
    for (const list of reverse.values()) list.sort((a, b) => b.p - a.p || a.id - b.id);
  }
  return reverse.get(i) || [];
}

// A table's rows as objects by column; the text itself is what gets exported.
const TABLES = {};
for (const [name, table] of Object.entries(D.tables)) {
  TABLES[name] = {
    columns: table.columns,
    rows: table.rows,
    threshold: table.threshold ?? null,
    items: table.rows.map((row) => Object.fromEntries(table.columns.map((column, c) => [column, row[c]]))),
  };
}

const GROUPS = [];  // duplicates: rows of one group together
for (const item of TABLES.duplicates.items) {
  if (!GROUPS.length || GROUPS[GROUPS.length - 1][0].group !== item.group) GROUPS.push([]);
  GROUPS[GROUPS.length - 1].push(item);
}

// Sheets of thumbnails: within this file, made into addresses when first needed, or files beside it.
const urls = [];
function sheetUrl(sheet) {
  if (!D.sheets.inline) return `${D.sheets.folder}/sheet-${String(sheet).padStart(5, "0")}.webp`;
  if (!urls[sheet]) {
    const bytes = decode(D.sheets.inline[sheet], Uint8Array);
    urls[sheet] = URL.createObjectURL(new Blob([bytes], { type: "image/webp" }));
    D.sheets.inline[sheet] = "";
  }
  return urls[sheet];
}

// Where the picture itself lies, seen from this page; null where that cannot be told.
const UNLINKED = new Set(D.unlinked);
function fileLink(i) {
  const base = D.bases[i < D.train ? 0 : 1];
  if (base === null || UNLINKED.has(i)) return null;
  return base + nameOf(i).split("/").map(encodeURIComponent).join("/");
}
