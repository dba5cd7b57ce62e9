// Draws the panels of a report with plotly, from the JSON in #data, and redraws them when a control changes.
"use strict";
(() => {
  const {sections} = JSON.parse(document.getElementById("data").textContent);
  const LIGHT = ["#0b62a8", "#c8500b", "#1a7f4b", "#a3358f", "#8a6400", "#4a4fc4", "#b3263a", "#0f7f8c", "#5c6670"];
  const DARK = ["#6db3f2", "#f39a5b", "#5fce91", "#e58bd3", "#e0bb4a", "#a3a7ff", "#f58a97", "#5ccbd8", "#b4bec8"];
  const DASHES = ["solid", "dash", "dot", "dashdot"];
  const CORRELATIONS = new Set(["matthews", "pearson", "spearman"]);
  const X_AXES = {
    step: {label: "step", title: "step"},
    tokens_seen: {label: "tokens", title: "tokens seen, with padding"},
    examples_seen: {label: "sequences", title: "sequences seen"},
    hours: {label: "wall time", title: "hours since the first row"},
  };
  const state = {x: "step", log: false, rows: 10, hidden: new Set()};
  const root = document.documentElement;
  const find = (id) => document.getElementById(id);
  const media = matchMedia("(prefers-color-scheme: dark)");
  let printing = false;

  // --- Data ---------------------------------------------------------------------------------------------------------

  // plotly reads some HTML in texts.
  const plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  function runningMean(values, rows) {
    const kept = [];
    let sum = 0;
    return values.map((value) => {
      if (value === null) return null;
      kept.push(value);
      sum += value;
      if (kept.length > rows) sum -= kept.shift();
      return sum / kept.length;
    });
  }

  // The position of a step on another x axis, between the two rows around it; null before the first row with a value.
  function positionOf(run, step) {
    if (state.x === "step") return step;
    const steps = run.train.step || [], xs = run.train[state.x] || [];
    const next = steps.findIndex((at, i) => at >= step && typeof xs[i] === "number");
    if (next < 0) return null;
    if (steps[next] === step || next === 0 || typeof xs[next - 1] !== "number") return xs[next];
    const share = (step - steps[next - 1]) / (steps[next] - steps[next - 1]);
    return xs[next - 1] + share * (xs[next] - xs[next - 1]);
  }

  function columnX(run, line) {
    const columns = run[line.split];
    return columns[state.x] || columns.step.map((step) => positionOf(run, step));
  }

  const isDark = () => root.hasAttribute("data-dark");
  const colorOf = (run) => (isDark() ? DARK : LIGHT)[run.color % LIGHT.length];
  const isShown = (section, run) => !state.hidden.has(section.id + "/" + run.name);

  function traces(section, panel) {
    const found = [];
    for (const run of section.runs.filter((run) => isShown(section, run))) {
      let splits = 0;
      for (const line of panel.lines) {
        const values = run[line.split][line.key];
        if (!values) continue;
        const name = plain(run.name + (line.label ? ", " + line.label : ""));
        const trace = {
          x: columnX(run, line), y: values, name, mode: "lines", type: "scatter", line: {color: colorOf(run), width: 2},
          hovertemplate: panel.percent ? "%{y:.2%}" : "%{y:.5~g}", connectgaps: true,
        };
        if (line.style === "smoothed" && state.rows > 1 && values.length > 2) {
          found.push({...trace, opacity: 0.28, line: {...trace.line, width: 1}, hoverinfo: "skip", hovertemplate: null});
          trace.y = runningMean(values, state.rows);
        } else if (line.style === "points") {
          trace.mode = "lines+markers";
          trace.marker = {size: 6};
          trace.line = {...trace.line, width: 1.5, dash: DASHES[splits++ % DASHES.length]};
        } else if (line.style === "dashed") {
          trace.line = {...trace.line, dash: "dash", width: 1.5};
          if (line.split === "train") trace.y = runningMean(values, state.rows);
        } else if (line.style === "steps") {
          trace.line = {...trace.line, shape: "hv"};
        }
        found.push(trace);
      }
    }
    return found;
  }

  function marks(section, panel, colors) {
    const shapes = [], annotations = [], places = new Map();
    for (const run of section.runs.filter((run) => isShown(section, run))) {
      for (const phase of run.phases) {
        const at = positionOf(run, phase.step);
        if (at !== null && !places.has(at)) places.set(at, phase.label.split(":")[0]);
      }
    }
    for (const [at, label] of places) {
      shapes.push({type: "line", x0: at, x1: at, yref: "paper", y0: 0, y1: 1,
        line: {color: colors.quiet, width: 1, dash: "dot"}});
      annotations.push({x: at, y: 0, yref: "paper", yanchor: "bottom", xanchor: "left", text: plain(label),
        showarrow: false, font: {size: 11, color: colors.quiet}});
    }
    if (panel.rule) {
      shapes.push({type: "line", xref: "paper", x0: 0, x1: 1, y0: panel.rule.y, y1: panel.rule.y,
        line: {color: colors.quiet, width: 1, dash: "dot"}});
      annotations.push({xref: "paper", x: 1, y: panel.rule.y, xanchor: "right", yanchor: "bottom",
        text: plain(panel.rule.label), showarrow: false, font: {size: 11, color: colors.quiet}});
    }
    const baseline = panel.lines.find((line) => line.style === "dashed" && line.split === "eval");
    const known = section.runs.find((run) => baseline && isShown(section, run) && run.eval[baseline.key]);
    if (known) {
      const y = known.eval[baseline.key].at(-1);
      annotations.push({xref: "paper", x: 1, xanchor: "right", y: state.log && panel.log ? Math.log10(y) : y,
        yanchor: "bottom", text: plain(baseline.label), showarrow: false, font: {size: 11, color: colors.quiet}});
    }
    return {shapes, annotations};
  }

  function layout(section, panel) {
    const style = getComputedStyle(root), read = (name) => style.getPropertyValue("--" + name).trim();
    const colors = {text: read("text"), quiet: read("quiet"), line: read("line"), panel: read("panel")};
    const axis = {gridcolor: colors.line, zeroline: false, linecolor: colors.line, tickfont: {size: 11}, automargin: true};
    return {
      paper_bgcolor: colors.panel, plot_bgcolor: colors.panel, showlegend: false, hovermode: "x unified",
      margin: {l: 46, r: 14, t: 8, b: 40}, font: {family: getComputedStyle(document.body).fontFamily, color: colors.text},
      hoverlabel: {bgcolor: colors.panel, bordercolor: colors.line, font: {size: 12, color: colors.text}, namelength: 40},
      xaxis: {...axis, title: {text: X_AXES[state.x].title, font: {size: 12}, standoff: 4}, hoverformat: ",.6~g",
        nticks: 7},
      yaxis: {...axis, type: state.log && panel.log ? "log" : "linear", tickformat: panel.percent ? ".0~%" : undefined,
        exponentformat: panel.id.endsWith("_per_second") ? "SI" : "power", nticks: 7,
        rangemode: panel.lines[0].style === "steps" ? "tozero" : "normal",
        ...(panel.percent ? {maxallowed: 1.02, minallowed: CORRELATIONS.has(panel.id) ? -1.02 : -0.02} : {})},
      uirevision: state.x + "/" + (state.log && panel.log), ...marks(section, panel, colors),
    };
  }

  // --- Plots --------------------------------------------------------------------------------------------------------

  const options = {displaylogo: false, modeBarButtons: [["toImage", "resetScale2d"]]};

  function plot(section, number) {
    const place = find(section.id + "-" + number), panel = section.panels[number];
    return Plotly.react(place, traces(section, panel), layout(section, panel), options);
  }

  function draw(only) {
    const drawn = [];
    for (const section of sections) {
      if (only && section !== only) continue;
      section.panels.forEach((_, number) => drawn.push(plot(section, number)));
      find(section.id + "-key").textContent = key(section);
    }
    return Promise.all(drawn);
  }

  function key(section) {
    const means = Math.max(...section.runs.map((run) => run.rows_a_point));
    const missing = section.runs.filter((run) => state.x !== "step" && !run.train[state.x]).map((run) => run.name);
    return "Lines: training, mean of the last " + (state.rows > 1 ? state.rows + " rows; faint: each row. " : "row. ") +
      "Dots: evaluations. " +
      (section.id === "pretraining" ? "Dashed in the loss: unigram baseline. " : "Dashes of scores: splits. ") +
      (means > 1 ? "A row of a long run stands for up to " + means + " logged rows. " : "") +
      "Drag to zoom, double-click to reset; all panels follow." +
      (missing.length ? " Without " + X_AXES[state.x].label + ": " + missing.join(", ") + "." : "");
  }

  // Panels of a section share the range of x.
  function linkPanels(section) {
    let linking = false;
    section.panels.forEach((_, number) => {
      find(section.id + "-" + number).on("plotly_relayout", (event) => {
        const range = ["xaxis.range[0]", "xaxis.range[1]"], isReset = event["xaxis.autorange"];
        if (linking || !(isReset || range.every((name) => name in event))) return;
        linking = true;
        const update = isReset ? {"xaxis.autorange": true} : Object.fromEntries(range.map((name) => [name, event[name]]));
        const others = section.panels.map((_, other) => other).filter((other) => other !== number);
        Promise.all(others.map((other) => Plotly.relayout(find(section.id + "-" + other), update)))
          .finally(() => { linking = false; });
      });
    });
  }

  function legend(section) {
    const place = find(section.id + "-legend");
    place.replaceChildren(...section.runs.map((run) => {
      const button = document.createElement("button"), swatch = document.createElement("span");
      swatch.className = "swatch";
      swatch.style.background = colorOf(run);
      button.type = "button";
      button.title = "Click: hide or show. Double-click: show this run alone.";
      button.setAttribute("aria-pressed", isShown(section, run));
      button.append(swatch, run.name);
      button.onclick = () => {
        const name = section.id + "/" + run.name;
        if (!state.hidden.delete(name)) state.hidden.add(name);
        button.setAttribute("aria-pressed", isShown(section, run));
        draw(section);
      };
      button.ondblclick = () => {
        section.runs.forEach((other) => state.hidden.add(section.id + "/" + other.name));
        state.hidden.delete(section.id + "/" + run.name);
        legend(section);
        draw(section);
      };
      return button;
    }));
  }

  // --- Controls -----------------------------------------------------------------------------------------------------

  function applyTheme() {
    const chosen = find("theme").value;
    root.toggleAttribute("data-dark", !printing && (chosen === "dark" || (chosen === "auto" && media.matches)));
    sections.forEach(legend);
    return draw();
  }

  find("theme").onchange = applyTheme;
  media.addEventListener("change", applyTheme);
  addEventListener("beforeprint", () => { printing = true; applyTheme(); resize(318); });
  addEventListener("afterprint", () => { printing = false; applyTheme(); resize(); });

  function resize(width) {
    for (const place of document.querySelectorAll(".plot")) {
      if (width) Plotly.relayout(place, {width, height: 230});
      else Plotly.relayout(place, {width: undefined, height: undefined, autosize: true});
    }
  }

  if (sections.length) {
    const runs = sections.flatMap((section) => section.runs);
    for (const [name, axis] of Object.entries(X_AXES)) {
      if (runs.some((run) => run.train[name])) find("x").add(new Option(axis.label, name));
    }
    find("x").onchange = (event) => { state.x = event.target.value; draw(); };
    find("y").onchange = (event) => { state.log = event.target.value === "log"; draw(); };
    find("smoothing").oninput = (event) => {
      state.rows = Number(event.target.value);
      find("smoothed").value = state.rows === 1 ? "off" : state.rows + " rows";
      draw();
    };
  }
  applyTheme().then(() => {
    sections.forEach(linkPanels);
    const sizes = new ResizeObserver((changes) => changes.forEach(({target}) => {
      if (!printing) Plotly.Plots.resize(target);
    }));
    document.querySelectorAll(".plot").forEach((place) => sizes.observe(place));
    document.body.dataset.drawn = document.querySelectorAll(".plot .main-svg").length ? "curves" : "tables";
  });
})();
