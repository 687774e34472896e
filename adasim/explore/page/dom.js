// Elements from code: text becomes text nodes, never markup.
const $ = (id) => document.getElementById(id);

function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, v] of Object.entries(value)) element.style.setProperty(key, v);
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(2)) {  // one by one: a call with a hundred thousand arguments fails
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
  return element;
}

function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// A name whose direction of writing stays its own.
const text = (name, cls = "") => h("bdi", { class: cls, title: name }, name);

function picture(i, cls = "") {
  const { columns, tile } = D.sheets;
  const place = i % (columns * columns);
  const at = (n) => `${(100 * n) / (columns - 1)}%`;
  const element = h("span", { class: `picture ${cls}`, "aria-hidden": "true" });
  if (!WIDTHS[i]) return h("span", { class: `picture unreadable ${cls}`, "aria-hidden": "true" }, "?");
  element.style.backgroundImage = `url("${sheetUrl(Math.floor(i / (columns * columns)))}")`;
  element.style.backgroundSize = `${100 * columns}%`;
  element.style.backgroundPosition = `${at(place % columns)} ${at(Math.floor(place / columns))}`;
  if (tile <= 48) element.classList.add("pixels");
  return element;
}

const bar = (p, cls = "") =>
  h("span", { class: `bar ${cls}`, "aria-hidden": "true" }, h("span", { style: { width: `${100 * p}%` } }));

const title = (i) => `image ${i}, ${nameOf(i)}${labelOf(i) ? `, labelled ${labelOf(i)}` : ""}`;

// A thumbnail that leads to the image's neighbours, with its label and, where given, its share; the longest bar is full.
function tile(i, { p = null, most = 1, own = false, note = "", chosen = false, differs = false } = {}) {
  const described = `${title(i)}${p === null ? "" : `, ${percent(p)}`}${note ? `, ${note}` : ""}`;
  return h(
    "a",
    {
      class: `tile${own ? " own" : ""}${chosen ? " chosen" : ""}`,
      href: address("neighbours", { image: i }),
      "aria-label": described,
      "data-image": i,
      title: described,
      tabindex: "-1",
    },
    picture(i),
    p === null ? null : bar(p / most, own ? "self" : ""),
    h(
      "span",
      { class: "caption" },
      p === null ? null : h("span", { class: "share" }, percent(p)),
      h("span", { class: differs ? "name differs" : "name" }, own ? "itself" : note || labelOf(i) || shortName(i)),
    ),
  );
}

let spoken = 0;
function say(sentence) {  // to a screen reader; the same words twice must still be news
  $("live").textContent = sentence + (spoken++ % 2 ? " " : "");
}

function download(name, content, type) {
  const link = h("a", { href: URL.createObjectURL(new Blob([content], { type })), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
