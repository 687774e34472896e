// Verdicts and lists as files: saved, and verdicts loaded again.

// As adasim/util/csv.py writes it: nothing in a field may begin a formula.
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

// The inverse of toCsv, also after a spreadsheet has saved the file; null for what is no table.
function fromCsv(content) {
  const [first] = content.split("\n", 1);
  const separator = first.split(";").length > first.split(",").length ? ";" : ",";
  const field = new RegExp(`(?:"([^"]*(?:""[^"]*)*)"|([^"${separator}\\r\\n]*))(${separator}|\\r?\\n|$)`, "y");
  const lines = [[]];
  while (field.lastIndex < content.length) {
    const match = field.exec(content);
    if (!match) return null;
    lines[lines.length - 1].push((match[1] ?? match[2]).replaceAll('""', '"'));
    if (match[3] !== separator) lines.push([]);
  }
  const [columns, ...rows] = lines;
  return rows.map((row) => Object.fromEntries(row.map((text, c) => [columns[c], text.replace(/^'/, "")])));
}

const VERDICT_COLUMNS = ["id", "split", "file", "label", "verdict", "new_label", "view"];
function verdictRows() {  // one for each verdict, of an image the weightiest first
  return [...verdicts.keys()].sort((a, b) => a - b).flatMap((id) => entriesOf(id).sort(byWeight).map((entry) =>
    [String(id), splitOf(id), nameOf(id), labelOf(id), entry.verdict, entry.label || "", entry.view || ""]));
}

function exportTable(name, columns, rows, kind) {
  if (kind === "csv") download(`${name}.csv`, toCsv(columns, rows), "text/csv;charset=utf-8");
  else download(`${name}.json`, toJson(columns, rows), "application/json");
  say(`${name}.${kind} with ${rows.length} rows was downloaded.`);
  if (columns !== VERDICT_COLUMNS) return;
  unsaved = false;
  warn();
}

// Adds the verdicts of a saved file to those that are here, in the place of what the same list says of the same image.
// Returns what there is to tell.
function loadVerdicts(name, content) {
  let rows;
  try { rows = JSON.parse(content); } catch { rows = fromCsv(content); }
  const ids = new Map(D.names.map((file, id) => [file, id]));
  const judged = (Array.isArray(rows) ? rows : []).filter((row) => row && rank(row) >= 0);
  const changes = judged.filter(({ file }) => ids.has(file)).map(({ file, verdict, new_label: label, view }) =>
    [ids.get(file), { verdict, view: Object.hasOwn(VERDICTS, view) ? view : "neighbours",
      ...(label ? { label: String(label) } : {}) }]);
  if (!changes.length) {
    return `${name} holds no verdicts on these images. Choose a verdicts.csv or verdicts.json that was saved from this page.`;
  }
  const before = unsaved;
  decide(changes, { view: "", ids: [] });
  unsaved &&= before;  // a file holds the new ones
  warn();
  const others = judged.length - changes.length;
  return `${name}: ${number(changes.length)} verdicts loaded` +
    (others ? `, ${number(others)} on other images left out.` : ".");
}
