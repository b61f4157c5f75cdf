// Of the page of report.html: the section of a bench: tables of all rows, and of ratios with their intervals; curves where Chart.js was built in.
const colours = ["#2f81d8", "#d9642a", "#1a9a72", "#b65fc9", "#c99a17", "#53b4c9", "#d1507a", "#8a93a0"], dashes = [[], [6, 4], [2, 3], [9, 3, 2, 3]];
const valueOf = (row, name) => name == "W" ? row.world_size : name == "kernels" ? row.kernels ?? row.ran?.name ?? "" : text(row.params[name] ?? "");
const stagesOf = (row) => unique(["forward", "backward", ...Object.keys(row.efficiency)]).filter((stage) => stage != "together" && stage in row.efficiency);
const stageOf = (row, stage) => row.measured.stages?.[stage] || {};
const swept = (rows) => ["W", "kernels", ...unique(rows.flatMap((row) => Object.keys(row.params)))].filter((name) => unique(rows.map((row) => valueOf(row, name))).length > 1)
  .filter((name) => name != "max_seqlen_kv" || rows.some((row) => row.params.max_seqlen_kv != row.params.max_seqlen_q));
const withInterval = ({value, low, high}) => `${fixed(value)} [${fixed(low)}, ${fixed(high)}]`;

function intervalBar({value, low, high}, reach, colour) {  // on a logarithmic scale with 1 in the middle
  const at = (ratio) => 80 + 76 * Math.log(ratio) / reach, svg = (tag, attributes) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    Object.entries(attributes).forEach(([name, of]) => node.setAttribute(name, of));
    return node;
  };
  const picture = svg("svg", {width: 160, height: 14});
  picture.append(svg("line", {x1: 80, x2: 80, y1: 0, y2: 14, stroke: "currentColor", "stroke-opacity": 0.35}));
  if ([value, low, high].every((each) => finite(each) && each > 0))
    picture.append(svg("line", {x1: at(low), x2: at(high), y1: 7, y2: 7, stroke: colour, "stroke-width": 3}), svg("circle", {cx: at(value), cy: 7, r: 4, fill: colour}));
  return picture;
}

// `of` returns a row's ratios by stage, and `verdict` what is said of them.
function showRatios(title, rows, dims, of, verdict, name) {
  const lines = rows.flatMap((row) => stagesOf(row).filter((stage) => of(row)?.[stage]).map((stage) => ({row, stage, ratio: of(row)[stage]})));
  if (!lines.length) return null;
  const reach = Math.max(Math.log(1.02), ...lines.flatMap(({ratio}) => [ratio.low, ratio.high].filter((end) => end > 0).map((end) => Math.abs(Math.log(end)))));
  const colour = (said) => said == "slower" ? "var(--bad)" : said == "faster" ? "#1a8f4c" : colours[0];
  return [el("h3", {}, title), table([...dims, "stage", "ratio of times [95 % interval]", `${fixed(Math.exp(-reach), 2)} \u2026 1 \u2026 ${fixed(Math.exp(reach), 2)}`, ""],
    lines.map(({row, stage, ratio}) => [...dims.map((dim) => valueOf(row, dim)), stage, withInterval(ratio), intervalBar(ratio, reach, colour(verdict(row))), el("span", {class: "verdict is-" + verdict(row)}, verdict(row))]), {class: name})];
}

function showRows(rows, dims, stages) {
  const columns = [...dims.map((dim) => isNaN(valueOf(rows[0], dim)) ? dim : "#" + dim), ...stages.flatMap((stage) => [`#${stage} ms`, "#TFLOP/s"]), "#efficiency", "#exposed", "#error", "#samples"];
  return table(columns, rows.map((row) => {
    const measured = row.measured, begin = dims.map((dim, i) => el("td", columns[i][0] == "#" ? {class: "n"} : {}, valueOf(row, dim))), errors = Object.values(row.errors || {}).filter(finite);
    const exposed = stages.reduce((sum, stage) => sum + (stageOf(row, stage).exposed_ms ?? NaN), 0) / measured.together?.ms;
    const figures = stages.flatMap((stage) => { const {ms, precision, tflops} = stageOf(row, stage); return [fixed(ms) + (finite(precision) ? ` \u00b1 ${percent(precision)}` : ""), fixed(tflops)]; });
    const samples = Math.max(...stages.map((stage) => stageOf(row, stage).samples ?? 0)) + (measured.precise ? "" : " !");
    const line = el("tr", {}, begin, measured.error ? el("td", {colspan: columns.length - dims.length, class: measured.skipped ? "dim" : "is-failed"}, (measured.skipped ? "skipped: " : "failed: ") + measured.error)
      : [...figures, percent(row.efficiency?.together), percent(exposed), errors.length ? fixed(Math.max(...errors), 2) : "\u2013", samples].map((value) => el("td", {class: "n"}, value)));
    const command = el("tr", {class: "command"}, el("td", {colspan: columns.length}, el("pre", {class: "repeat"}, row.command ?? "no command is known")));
    line.addEventListener("click", () => command.parentNode ? command.remove() : line.after(command));
    return line;
  }), {class: "rows"});
}

const whiskers = {id: "whiskers", afterDatasetsDraw(chart) {
  const pen = chart.ctx, y = chart.scales.y;
  chart.data.datasets.forEach((set, i) => chart.isDatasetVisible(i) && chart.getDatasetMeta(i).data.forEach((point, k) => {
    const {low, high} = set.data[k];
    if (!finite(low) || !finite(high)) return;
    const [top, end] = [y.getPixelForValue(high), y.getPixelForValue(low)];
    pen.save(); pen.strokeStyle = set.borderColor; pen.lineWidth = 1.5; pen.beginPath();
    pen.moveTo(point.x, top); pen.lineTo(point.x, end); pen.moveTo(point.x - 4, top); pen.lineTo(point.x + 4, top); pen.moveTo(point.x - 4, end); pen.lineTo(point.x + 4, end);
    pen.stroke(); pen.restore();
  }));
}};

function curves(place, title, unit, along, rows, lines, point) {
  const xs = unique(rows.map((row) => row.params[along])).sort((a, b) => a - b), datasets = [], kinds = lines.map((line) => unique(rows.map((row) => valueOf(row, line))));
  for (const label of unique(rows.map((row) => lines.map((line) => valueOf(row, line)).join(", ")))) {
    const of = rows.filter((row) => lines.map((line) => valueOf(row, line)).join(", ") == label).sort((a, b) => a.params[along] - b.params[along]);
    const colour = colours[lines.length ? kinds[0].indexOf(valueOf(of[0], lines[0])) % colours.length : 0], dash = lines.length > 1 ? dashes[kinds[1].indexOf(valueOf(of[0], lines[1])) % dashes.length] : [];
    const data = of.map((row) => ({x: Math.log2(row.params[along]), ...point(row)})).filter((each) => finite(each.y));
    if (data.length) datasets.push({label: label || "rate", data, borderColor: colour, backgroundColor: colour, borderDash: dash, borderWidth: 2, pointRadius: 3, tension: 0});
  }
  if (!datasets.length) return;
  const canvas = el("canvas", {"aria-label": title, role: "img"}), style = getComputedStyle(document.body), line = style.getPropertyValue("--line"), dim = style.getPropertyValue("--dim");
  place.append(el("div", {class: "chart"}, canvas));
  new Chart(canvas, {type: "line", data: {datasets}, plugins: [whiskers], options: {animation: false, maintainAspectRatio: false, plugins: {
    title: {display: true, text: title, color: style.color}, legend: {position: "bottom", labels: {color: dim, usePointStyle: true, pointStyle: "line", pointStyleWidth: 26}}, tooltip: {callbacks: {title: (items) => along + " " + 2 ** items[0].parsed.x,
      label: ({dataset, raw}) => `${dataset.label}: ${fixed(raw.y)} ${unit}` + (finite(raw.low) ? ` [${fixed(raw.low)}, ${fixed(raw.high)}]` : "")}}},
    scales: {y: {beginAtZero: true, suggestedMax: 1.05 * Math.max(...datasets.flatMap(({data}) => data.map(({y, high}) => finite(high) ? high : y))), grid: {color: line}, ticks: {color: dim}, title: {display: true, text: unit, color: dim}},
      x: {type: "linear", min: Math.log2(xs[0]) - 0.2, max: Math.log2(xs[xs.length - 1]) + 0.2, grid: {color: line}, title: {display: true, text: along, color: dim},
        afterBuildTicks: (axis) => { axis.ticks = xs.map((x) => ({value: Math.log2(x)})); }, ticks: {color: dim, autoSkip: false, callback: (x) => String(Math.round(2 ** x))}}}}});
}

// A line for each kernel and schedule; charts of their own for what else is swept.
function showCurves(rows, dims, stages, place) {
  const number = (name) => rows.every((row) => finite(row.params[name]) && row.params[name] > 0);
  const along = ["max_seqlen_q", ...dims].find((name) => dims.includes(name) && number(name)) ?? (number("max_seqlen_q") ? "max_seqlen_q" : null);
  if (!along) return;
  if (typeof Chart == "undefined") return place.append(el("p", {class: "dim"}, "Curves are left out: this cppool was built without Chart.js (Debian's libjs-chart.js)."));
  const others = dims.filter((name) => name != along && name != "max_seqlen_kv"), preferred = ["kernels", "cp_comm_type"].filter((name) => others.includes(name));
  const lines = preferred.length ? preferred : others.filter((name) => name != "W").slice(0, 1), facets = others.filter((name) => !lines.includes(name));
  const facetOf = (row) => facets.map((name) => name == "W" ? "W=" + row.world_size : `${name}=${valueOf(row, name)}`).join(", ");
  for (const facet of unique(rows.map(facetOf))) {
    const of = rows.filter((row) => facetOf(row) == facet), behind = facet && ", " + facet;
    for (const stage of stages) {
      const rated = of.some((row) => finite(stageOf(row, stage).tflops));
      curves(place, stage + behind, rated ? "TFLOP/s per GPU" : "ms", along, of, lines, (row) => {
        const {ms, tflops, precision} = stageOf(row, stage);
        const [y, low, high] = rated ? [tflops, tflops / (1 + precision), tflops / (1 - precision)] : [ms, ms * (1 - precision), ms * (1 + precision)];
        return finite(precision) && precision < 1 ? {y, low, high} : {y};  // few samples have no interval
      });
    }
    if (of.some((row) => row.world_size > 1)) curves(place, "efficiency" + behind, "% of one GPU's rate", along, of, lines, (row) => ({y: finite(row.efficiency?.together) ? 100 * row.efficiency.together : null}));
  }
}

function showBench(part) {
  const rows = part.records.map((row) => ({...row, efficiency: row.efficiency || {}})), measured = rows.filter((row) => !row.measured.error);
  if (!rows.length) return el("p", {class: "dim"}, "No row was measured.");
  const dims = swept(rows), stages = unique(measured.flatMap(stagesOf)), place = el("div", {class: "charts"});
  const notes = part.summary.notes || [], against = notes.find((note) => note.startsWith("against "));
  addEventListener("load", () => showCurves(measured, dims, stages, place));
  return [place, el("h3", {}, "Rows"), el("div", {class: "wide bench"}, showRows(rows, dims, stages)),
          el("p", {class: "on"}, "A click shows the command that measures a row again. \u00b1: half the 95 % interval of the median; !: the time limit came before the precision asked for; efficiency: the rate per GPU over that of the whole problem on one GPU; exposed: communication that no work hides; error: the largest against fp64, over plain attention's."),
          showRatios(against ? "A" + against.slice(1) : "Against the baseline", rows, dims, (row) => row.baseline?.ratio, (row) => row.baseline.verdict, "baseline"),
          showRatios("Against the first kernels", rows, dims, (row) => row.ratio, () => "", "ratios"),
          notes.filter((note) => note != against).map((note) => el("p", {class: "on note"}, note))];
}
