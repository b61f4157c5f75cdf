// Of the page of report.html: its helpers, and the section of a run.
"use strict";
// Texts of records become text nodes and values of attributes alone.
function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, String(value));
  node.append(...children.flat().filter((child) => child != null).map((child) => child instanceof Node ? child : String(child)));
  return node;
}
const unique = (values) => [...new Set(values)];
const text = (value) => typeof value == "string" ? value : JSON.stringify(value);
const finite = (value) => typeof value == "number" && isFinite(value);
const fixed = (value, digits = 3) => !finite(value) ? "\u2013" : value == 0 ? "0" :
  Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3 ? value.toExponential(2) : String(+value.toPrecision(digits + 1));
const percent = (value, digits = 1) => finite(value) ? (100 * value).toFixed(digits) + " %" : "\u2013";
function table(heads, rows, attributes) {  // a head that begins with "#" is that of numbers
  const cell = (tag, value, head) => el(tag, head[0] == "#" ? {class: "n"} : {}, value);
  return el("table", attributes, el("thead", {}, el("tr", {}, heads.map((head) => cell("th", head.replace("#", ""), head)))),
            el("tbody", {}, rows.map((row) => row instanceof Node ? row : el("tr", {}, row.map((value, i) => cell("td", value, heads[i]))))));
}

function ranOn(part) {
  const {host, begin, version, worlds = []} = part.summary;
  const lines = [[host && "host " + host, begin && begin.replace("T", " ") + " UTC", version && "cppool " + version].filter(Boolean).join(", ")];
  for (const world of worlds) {
    const devices = world.devices || [], ids = unique(devices.map((device) => device.uuid).filter(Boolean));
    const names = unique(devices.map((device) => device.name)).join(", "), ranks = devices.length + (devices.length == 1 ? " rank" : " ranks");
    lines.push(`W=${world.world_size}: backend ${world.backend}, transport ${world.transport}, ${ranks} on ${ids.length ? ids.length + " x " : ""}${names}`);
  }
  const ended = part.summary.interrupted || part.summary.stopped;
  return [el("h2", {}, part.from), el("p", {class: "on ran-on"}, lines.filter(Boolean).flatMap((line) => [line, el("br")])),
          ended ? el("p", {class: "warn"}, ended) : null];
}

// Runs: a grid with a field for each row, schedule and world size.
const ratioOf = (cell) => {
  const ratios = (cell.answer?.checks || []).filter((check) => "ratio" in check).map((check) => finite(check.ratio) ? check.ratio : Infinity);
  return ratios.length ? Math.max(...ratios) : null;
};
const scheduleOf = (cell) => cell.params.cp_comm_type ?? "";
const rowOf = (cell) => cell.name.split(" ").filter((word) => word != scheduleOf(cell) && word != "W=" + cell.world_size).join(" ");
const signs = {failed: "\u2715", error: "!", flaky: "~", skipped: "\u2013"};

function showWorst({worst, bad, where}) {
  if (!worst) return "";
  const index = worst.index || {}, axes = unique(["sequence", "head", "token", ...Object.keys(index)]).filter((axis) => axis in index);
  const at = axes.map((axis) => axis + " " + index[axis]).join(", ");
  return `${at}: got ${fixed(worst.got, 5)}, wanted ${fixed(worst.wanted, 5)}` + (bad ? `; ${bad} out${where ? ": " + where : ""}` : "");
}

function showChecks(checks, name) {
  const heads = ["tensor", "against", "#rank", "#largest error", "#tolerance", "#ratio", ...(checks.some((check) => check.worst) ? ["worst element"] : [])];
  return el("div", {class: "wide"}, table(heads, checks.map((check) =>
    [check.tensor, check.against, check.rank, fixed(check.max_abs_err), fixed(check.tolerance), "ratio" in check ? fixed(check.ratio, 2) : "", showWorst(check)].slice(0, heads.length)), {class: "checks " + name}));
}

function showCell(cell) {
  const answer = cell.answer || {}, checks = answer.checks || [];
  const failing = checks.filter((check) => !check.ok), holding = checks.filter((check) => check.ok).sort((a, b) => (b.against == "oracle") - (a.against == "oracle"));
  const facts = [finite(cell.seconds) && fixed(cell.seconds) + " s", cell.attempts > 1 && cell.attempts + " attempts", answer.kernels?.name && "kernels " + answer.kernels.name,
                 ...Object.entries(answer.tflops || {}).map(([stage, rate]) => `${stage} ${fixed(rate)} TFLOP/s`)].filter(Boolean);
  const block = (title, lines, name) => lines.length ? [el("h4", {}, title), lines.map((line) => el("pre", {class: name}, line))] : null;
  return [
    el("h3", {class: "name"}, cell.name), el("div", {}, el("span", {class: "verdict is-" + cell.status}, cell.status), " ", el("span", {class: "dim"}, facts.join(", "))),
    block(cell.status == "skipped" ? "Reason" : "Error", cell.error ? [cell.error] : [], "error"),
    block("Flaky", [...(cell.flaky ? [cell.flaky] : []), ...(cell.lost || []).map((lost, i) => `attempt ${i + 1}: ${lost.error}`)], "flaky-text"),
    block("Once more", cell.again ? [[cell.again.status ?? "not run", cell.again.folder && "in " + cell.again.folder, cell.again.note].filter(Boolean).join("; ")] : [], "again"),
    block("Diagnosis", cell.verdict ? [cell.verdict.text] : [], "diagnosis"),
    block("Errors of ranks", (answer.ranks || []).filter((rank) => rank.error && !(cell.error || "").includes(rank.error)).map((rank) => `rank ${rank.rank}: ${rank.error}`), "rank-error"),
    cell.repeat ? block("Repeat", [cell.repeat], "repeat") : null,
    failing.length ? [el("h4", {}, `${failing.length} of ${answer.of_checks} checks do not hold`), showChecks(failing, "failing")] : null,
    holding.length ? el("details", failing.length ? {} : {open: ""},
      el("summary", {class: "dim"}, `${answer.of_checks - failing.length} checks hold; of each tensor the worst of them`), showChecks(holding, "holding")) : null,
    block("Warnings", answer.warnings || [], "warning"),
    el("details", {}, el("summary", {class: "dim"}, "Parameters"), el("pre", {}, Object.entries(cell.params).map(([key, value]) => `${key}=${text(value)}`).join("\n"))),
    cell.output?.length ? el("details", {}, el("summary", {class: "dim"}, "Output"), el("pre", {class: "output"}, cell.output.join("\n"))) : null];
}

function showRun(part) {
  const cells = part.records, schedules = unique(cells.map(scheduleOf)), columns = [];
  for (const schedule of schedules)
    unique(cells.filter((cell) => scheduleOf(cell) == schedule).map((cell) => cell.world_size)).sort((a, b) => a - b).forEach((size, i) => columns.push({schedule, size, first: i == 0}));
  const rows = new Map(), detail = el("aside", {class: "detail"}, el("p", {class: "dim"}, "Click a field to see its checks, its error and the command that repeats it."));
  const choose = (button, cell) => {
    detail.parentNode?.querySelectorAll(".chosen").forEach((other) => other.classList.remove("chosen"));
    button.classList.add("chosen");
    detail.replaceChildren(...showCell(cell).flat(3).filter(Boolean));
  };
  let worst = null;  // what is shown first
  for (const cell of cells) {
    const ratio = ratioOf(cell), heat = ratio == null ? 0 : Math.min(Math.max((ratio - 1) / 3, 0), 1);
    const button = el("button", {class: "cell", "data-status": cell.status, "data-name": cell.name, style: `--heat: ${Math.round(100 * heat)}%`,
      title: `${cell.name}: ${cell.status}${cell.status == "skipped" ? ", " + cell.error : ratio == null ? "" : ", ratio " + fixed(ratio, 2)}`}, signs[cell.status] || (ratio == null ? "\u2713" : ratio.toFixed(1)));
    button.addEventListener("click", () => choose(button, cell));
    const weight = ["flaky", "error", "failed"].indexOf(cell.status) + 1;
    if (weight > (worst?.weight ?? 0)) worst = {weight, button, cell};
    if (!rows.has(rowOf(cell))) rows.set(rowOf(cell), new Map());
    const fields = rows.get(rowOf(cell)), key = scheduleOf(cell) + " " + cell.world_size;
    fields.set(key, [...(fields.get(key) || []), button]);
  }
  const head = [el("tr", {}, el("th", {}), schedules.map((schedule) => el("th", {class: "first", colspan: columns.filter((column) => column.schedule == schedule).length}, schedule))),
                el("tr", {}, el("th", {}), columns.map((column) => el("th", column.first ? {class: "first"} : {}, "W=" + column.size)))];
  const body = [...rows].map(([name, fields]) => el("tr", {}, el("th", {}, name), columns.map((column) => el("td", column.first ? {class: "first"} : {}, fields.get(column.schedule + " " + column.size)))));
  const chosen = new Set(), search = el("input", {type: "search", placeholder: "filter by name", "aria-label": "filter by name"});
  const filter = () => body.forEach((row) => {
    const buttons = [...row.querySelectorAll(".cell")];
    for (const button of buttons)
      button.classList.toggle("off", chosen.size > 0 && !chosen.has(button.dataset.status) || !search.value.split(" ").every((word) => button.dataset.name.includes(word)));
    row.hidden = buttons.every((button) => button.classList.contains("off"));
  });
  search.addEventListener("input", filter);
  const counts = ["passed", "failed", "error", "flaky", "skipped"].map((status) => {
    const count = cells.filter((cell) => cell.status == status).length, button = el("button", {"data-count": status, "aria-pressed": false}, `${count} ${status == "error" ? "without an answer" : status}`);
    button.addEventListener("click", () => { chosen.delete(status) || chosen.add(status); button.setAttribute("aria-pressed", chosen.has(status)); filter(); });
    return count || status == "passed" || status == "failed" ? button : null;
  });
  const reasons = unique(cells.filter((cell) => cell.status == "skipped").map((cell) => cell.error));
  if (worst) choose(worst.button, worst.cell);
  return [el("div", {class: "bar"}, counts, search, el("span", {class: "dim"}, "error, as a multiple of plain attention's: 1"), el("span", {class: "scale"}), el("span", {class: "dim"}, "4")),
          el("div", {class: "matrix"}, el("div", {class: "scroll"}, el("table", {class: "grid"}, el("thead", {}, head), el("tbody", {}, body))), detail),
          reasons.length ? [el("h3", {}, "Skipped"), table(["#cells", "reason"], reasons.map((reason) => [cells.filter((cell) => cell.error == reason && cell.status == "skipped").length, reason]), {class: "reasons"})] : null];
}
