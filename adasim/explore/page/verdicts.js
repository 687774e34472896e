// Verdicts: one per image, kept in this browser under the fingerprint of the data, so that a page that is written
// anew for the same images finds them again.
const KEY = `adasim-explore:${D.fingerprint}`;
const MEANING = { keep: "keep", reject: "leave out", relabel: "wrong label", unsure: "unsure" };

let stored = true;
let verdicts = new Map();
try {
  const saved = JSON.parse(localStorage.getItem(KEY) || "{}");
  for (const [id, entry] of Object.entries(saved)) {
    if (entry && Object.hasOwn(MEANING, entry.verdict) && Number(id) < D.count) verdicts.set(Number(id), entry);
  }
} catch {
  stored = false;
}
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

// changes: [[image, {verdict, label, view} or null], ...], undone together
function decide(changes, where) {
  undone.push({ where, before: changes.map(([id]) => [id, verdicts.get(id) || null]) });
  for (const [id, entry] of changes) entry ? verdicts.set(id, entry) : verdicts.delete(id);
  save();
}

function undo() {
  const last = undone.pop();
  if (!last) return null;
  for (const [id, entry] of last.before) entry ? verdicts.set(id, entry) : verdicts.delete(id);
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
    const entry = verdicts.get(id);
    return [String(id), splitOf(id), nameOf(id), labelOf(id), entry.verdict, entry.label || "", entry.view || ""];
  });
}

function exportTable(name, columns, rows, kind) {
  if (kind === "csv") download(`${name}.csv`, toCsv(columns, rows), "text/csv;charset=utf-8");
  else download(`${name}.json`, toJson(columns, rows), "application/json");
  say(`${name}.${kind} with ${rows.length} rows was downloaded.`);
}
