// Verdicts: of each image one per list, since every list asks something else. They are kept in this browser under the
// fingerprint of the data, so that a page that is written anew for the same images finds them again.
const KEY = `adasim-explore:${D.fingerprint}`;
const MEANING = { reject: "leave out", relabel: "wrong label", unsure: "unsure", keep: "keep" };  // the weightiest first
const rank = (entry) => Object.keys(MEANING).indexOf(entry.verdict);

let stored = true;
const verdicts = new Map();  // by image: [{verdict, label, view}, ...]
const entriesOf = (id) => verdicts.get(id) || [];
const given = (id, view) => entriesOf(id).find((entry) => entry.view === view);
const leftOutElsewhere = (id, view) =>
  entriesOf(id).find((entry) => entry.verdict === "reject" && entry.view !== view);

// What becomes of an image: its weightiest verdict, of several wrong labels the one that says which is right.
function verdictOn(id) {
  return [...entriesOf(id)].sort((a, b) => rank(a) - rank(b) || !a.label - !b.label)[0];
}

function put(id, entry) {  // in the place of that list's verdict before; one without a verdict takes it away
  const entries = entriesOf(id).filter(({ view }) => view !== entry.view).concat(entry.verdict ? [entry] : []);
  entries.length ? verdicts.set(id, entries) : verdicts.delete(id);
}

function load() {  // what this page, or another tab of it, has saved
  if (!stored) return;
  try {
    const saved = JSON.parse(localStorage.getItem(KEY));
    if (saved === null) return;  // nothing yet, or the browser was told to forget: what is here stays
    verdicts.clear();
    for (const [id, entries] of Object.entries(saved)) {
      for (const entry of [entries].flat()) if (entry && rank(entry) >= 0 && Number(id) < D.count) put(Number(id), entry);
    }
  } catch {
    stored = false;
  }
}
load();
const undone = [];

function save() {
  try {
    localStorage.setItem(KEY, JSON.stringify(Object.fromEntries(verdicts)));
    stored = true;
  } catch {
    stored = false;
    say("This browser keeps nothing: export the verdicts before you close the page.");
  }
  $("undo").disabled = !undone.length;
}

// changes: [[image, {verdict, label, view}], ...], undone together
function decide(changes, where) {
  load();
  undone.push({ where, before: changes.map(([id, { view }]) => [id, given(id, view) || { verdict: null, view }]) });
  for (const [id, entry] of changes) put(id, entry);
  save();
}

function undo() {
  const last = undone.pop();
  if (!last) return null;
  load();
  for (const [id, entry] of last.before) put(id, entry);
  save();
  return last.where;
}

// As adasim/spreadsheet.py writes it: nothing in a field may begin a formula.
function safe(field) {
  return /^[=+\-@\t\r\n']/.test(field) && !/^-?[0-9]+(\.[0-9]+)?$/.test(field) ? `'${field}` : field;
}

function toCsv(columns, rows) {
  const quoted = (field) => (/[",\r\n]/.test(field) ? `"${field.replaceAll('"', '""')}"` : field);
  const lines = [columns, ...rows.map((row) => row.map(safe))];
  return lines.map((line) => line.map(quoted).join(",") + "\r\n").join("");
}

function toJson(columns, rows) {
  const objects = rows.map((row) => Object.fromEntries(columns.map((column, c) => [column, row[c]])));
  return JSON.stringify(objects, null, 1) + "\n";
}

const VERDICT_COLUMNS = ["id", "split", "file", "label", "verdict", "new_label", "view"];
function verdictRows() {
  return [...verdicts.keys()].sort((a, b) => a - b).map((id) => {
    const entry = verdictOn(id);
    return [String(id), splitOf(id), nameOf(id), labelOf(id), entry.verdict, entry.label || "", entry.view || ""];
  });
}

function exportTable(name, columns, rows, kind) {
  if (kind === "csv") download(`${name}.csv`, toCsv(columns, rows), "text/csv;charset=utf-8");
  else download(`${name}.json`, toJson(columns, rows), "application/json");
  say(`${name}.${kind} with ${rows.length} rows was downloaded.`);
}
