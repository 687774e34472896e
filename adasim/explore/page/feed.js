// A long list of items of one height, in one column or several, of which only those in sight exist.
class Feed {
  // items: what is listed; make(item, index) fills an <article>; label names the list; onSee(item) when it is in sight
  constructor({ items, make, label, at, onMove, onSee, kind }) {
    Object.assign(this, { items, make, onMove, onSee });
    this.at = Math.min(Math.max(0, at), Math.max(0, items.length - 1));
    this.shown = new Map();
    this.element = h("div", { class: `feed ${kind}`, role: "feed", "aria-label": label });
    this.update = this.update.bind(this);
    this.later = () => {
      if (!this.frame) this.frame = requestAnimationFrame(() => { this.frame = 0; this.update(); });
    };
    this.resized = () => { this.refresh(); this.later(); };  // as many pictures as there is width for
    addEventListener("scroll", this.later, { passive: true });
    addEventListener("resize", this.resized, { passive: true });
  }

  replace(items) {  // other items, from the first one on
    for (const node of this.shown.values()) node.remove();
    this.shown.clear();
    this.items = items;
    this.at = 0;
    this.before = "";
    this.update();
  }

  start() {  // once the element stands in the page
    this.update();
    if (this.at) this.reveal();
  }

  stop() {
    removeEventListener("scroll", this.later);
    removeEventListener("resize", this.resized);
    cancelAnimationFrame(this.frame);
  }

  get height() {
    return parseFloat(getComputedStyle(this.element).getPropertyValue("--item"));
  }

  get columns() {
    const least = parseFloat(getComputedStyle(this.element).getPropertyValue("--least"));
    return Math.max(1, Math.floor(this.element.clientWidth / least));
  }

  row(index) {
    return Math.floor(index / this.columns);
  }

  place(node, index) {
    node.style.top = `${this.row(index) * this.height}px`;
    node.style.left = `calc(${index % this.columns} * (100% + 12px) / ${this.columns})`;
    node.style.width = `calc((100% + 12px) / ${this.columns} - 12px)`;
  }

  update() {
    const { height, columns } = this;
    if (`${height} ${columns}` !== this.before) {
      this.before = `${height} ${columns}`;
      this.element.style.height = `${height * Math.ceil(this.items.length / columns)}px`;
      for (const [index, node] of this.shown) this.place(node, index);
    }
    const top = -this.element.getBoundingClientRect().top;
    const first = columns * Math.max(0, Math.floor(top / height) - 3);
    const last = Math.min(this.items.length, columns * (Math.ceil((top + innerHeight) / height) + 3));
    const focused = document.activeElement && document.activeElement.closest("article");
    for (const [index, node] of this.shown) {
      if ((index < first || index >= last) && node !== focused && index !== this.at) {
        node.remove();
        this.shown.delete(index);
      }
    }
    for (let index = first; index < last; index++) {
      this.node(index);
      const row = Math.floor(index / columns);
      if ((row + 0.7) * height > top && (row + 0.5) * height < top + innerHeight) this.onSee(this.items[index]);
    }
    if (this.items.length) this.node(this.at);
  }

  node(index) {
    if (!this.shown.has(index)) {
      const node = h("article", {
        "aria-posinset": index + 1,
        "aria-setsize": this.items.length,
        "data-index": index,
      });
      this.place(node, index);
      this.shown.set(index, node);
      // In the order of the list, for those who read the page and do not see it.
      const after = [...this.shown.keys()].filter((n) => n > index).sort((a, b) => a - b)[0];
      this.element.insertBefore(node, after === undefined ? null : this.shown.get(after));
      this.fill(index);
    }
    return this.shown.get(index);
  }

  fill(index) {
    const node = this.shown.get(index);
    if (!node) return;
    node.replaceChildren(...this.make(this.items[index], index));
    node.tabIndex = index === this.at ? 0 : -1;
    node.classList.toggle("current", index === this.at);
    const heading = node.querySelector("h3");
    if (heading) {
      heading.id = `item-${index}`;
      node.setAttribute("aria-labelledby", heading.id);
    }
  }

  refresh() {
    for (const index of this.shown.keys()) this.fill(index);
  }

  move(to, focus = true) {
    if (!this.items.length) return;
    const before = this.at;
    this.at = Math.min(Math.max(0, to), this.items.length - 1);
    this.node(this.at);
    for (const index of [before, this.at]) {
      const node = this.shown.get(index);
      if (!node) continue;
      node.classList.toggle("current", index === this.at);
      node.tabIndex = index === this.at ? 0 : -1;
    }
    this.reveal();
    if (focus) this.shown.get(this.at).focus({ preventScroll: true });
    this.onMove(this.at);
  }

  reveal() {
    const height = this.height;
    const top = this.element.getBoundingClientRect().top + scrollY + this.row(this.at) * height;
    const end = scrollY + innerHeight - $("notice").offsetHeight;
    const bars = document.querySelector(".views").offsetHeight + 10;  // it sticks to the top
    if (!this.row(this.at)) scrollTo({ top: 0 });
    else if (top < scrollY + bars) scrollTo({ top: top - bars });
    else if (top + height > end) scrollTo({ top: scrollY + top + height - end + 12 });
    this.update();
  }
}
