"use strict";
(() => {
  const PAGE = 60;
  const { columns, rows, filters } = JSON.parse(document.getElementById("data").textContent);
  const last = columns.length;
  const head = document.querySelector("#table thead");
  const body = document.querySelector("#table tbody");
  const search = document.getElementById("search");
  const count = document.getElementById("count");
  const more = document.getElementById("more");
  const text = (cell) => (cell === null ? "n/a" : Array.isArray(cell) ? cell[0] : cell);
  const haystack = rows.map((row) => row.slice(0, last).map((cell) => (cell === null ? "" : text(cell))).join(" ").toLowerCase());
  const chosen = new Map();
  let order = rows.map((_, index) => index);
  let sorted = { column: -1, down: false };
  let shown = PAGE;

  const make = (tag, content, name) => {
    const element = document.createElement(tag);
    if (content !== undefined) element.textContent = content;
    if (name) element.className = name;
    return element;
  };

  const compare = (a, b) => {
    const one = rows[a][sorted.column];
    const two = rows[b][sorted.column];
    if (one === null || two === null) return (one === null) - (two === null) || a - b; // what is missing stays last
    const result = Array.isArray(one) ? one[1] - two[1] : one.localeCompare(two, "en", { numeric: true });
    return (sorted.down ? -result : result) || a - b;
  };

  const matching = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    return order.filter((index) =>
      words.every((word) => haystack[index].includes(word)) &&
      [...chosen].every(([column, value]) => rows[index][column] === value));
  };

  const line = (index) => {
    const row = make("tr");
    columns.forEach((column, at) => {
      const cell = rows[index][at];
      const outcome = at === last - 1 ? String(cell) : "";
      const name = column.kind === "number" ? "figure" : /^(ok|flagged|oom|failed|unsupported)$/.test(outcome) ? outcome : "";
      const made = make("td", text(cell) === "" ? "-" : text(cell) ?? "-", name);
      if (String(text(cell)).length > 30) made.title = text(cell);
      row.append(made);
    });
    row.dataset.index = index;
    row.tabIndex = 0;
    return row;
  };

  const draw = () => {
    const found = matching();
    body.replaceChildren(...found.slice(0, shown).map(line));
    count.textContent = `${found.length} of ${rows.length} records`;
    more.hidden = found.length <= shown;
    more.textContent = `Show more (${Math.max(0, found.length - shown)} left)`;
  };

  const sortBy = (column) => {
    sorted = { column, down: sorted.column === column && !sorted.down };
    order = rows.map((_, index) => index).sort(compare);
    head.querySelectorAll("th").forEach((cell, at) => {
      if (at === column) cell.setAttribute("aria-sort", sorted.down ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    });
    shown = PAGE;
    draw();
  };

  const titles = make("tr");
  columns.forEach((column, at) => {
    const cell = make("th", undefined, column.kind === "number" ? "figure" : "");
    const button = make("button", column.title);
    button.type = "button";
    button.addEventListener("click", () => sortBy(at));
    const tier = make("small", column.tier);
    tier.title = column.tier;
    cell.append(button, tier);
    titles.append(cell);
  });
  head.append(titles);

  filters.forEach(({ column, values }) => {
    const menu = make("select");
    menu.setAttribute("aria-label", columns[column].title);
    menu.append(new Option(`any ${columns[column].title}`, ""));
    values.forEach((value, at) => menu.append(new Option(value === "" ? "(empty)" : value, String(at + 1))));
    menu.addEventListener("change", () => {
      if (menu.value) chosen.set(column, values[Number(menu.value) - 1]);
      else chosen.delete(column);
      shown = PAGE;
      draw();
    });
    document.getElementById("menus").append(menu);
  });

  const toggle = (event) => {
    const row = event.target.closest("tr[data-index]");
    if (!row || String(getSelection())) return;
    if (row.nextSibling && !row.nextSibling.dataset.index) { row.nextSibling.remove(); return; }
    const details = make("tr");
    const cell = make("td", rows[row.dataset.index][last] || "No findings; nothing is missing.", "details");
    cell.colSpan = columns.length;
    details.append(cell);
    row.after(details);
  };
  body.addEventListener("click", toggle);
  body.addEventListener("keydown", (event) => { if (event.key === "Enter") toggle(event); });

  let waiting;
  search.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => { shown = PAGE; draw(); }, 80);
  });
  more.addEventListener("click", () => { shown += 5 * PAGE; draw(); });
  addEventListener("beforeprint", () => {
    document.querySelectorAll(".lacking").forEach((element) => { element.open = true; });
    shown = Math.max(shown, 1000);
    draw();
  });
  draw();

  const only = document.getElementById("only");
  if (only) only.addEventListener("change", () => {
    document.querySelectorAll("[data-workload]").forEach((element) => {
      element.hidden = only.value !== "" && element.dataset.workload !== only.value;
    });
  });
})();
