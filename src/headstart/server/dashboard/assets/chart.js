// The page's charts: uPlot in our colours, as wide as their panel. Another theme needs new charts.

import { colour, find, make } from "./page.js";

const HEIGHT = 170;
const FONT = "12px system-ui, sans-serif";

const axis = (more) => ({
  stroke: colour("quiet"),
  grid: { stroke: colour("line"), width: 1 },
  ticks: { show: false },
  font: FONT,
  ...more,
});

/** A figure with a caption in the page's grid, and the chart in it. */
function figure(id, caption, note, options, data) {
  const place = make("div", { class: "chart" });
  const words = make("figcaption", {}, caption, make("small", {}, note));
  find("charts").append(make("figure", { id, class: "panel" }, words, place));
  const width = () => Math.max(place.clientWidth, 100);
  const chart = new uPlot(
    {
      width: width(),
      height: HEIGHT,
      padding: [12, 8, 0, 0],
      cursor: { drag: { setScale: false, x: false, y: false } },
      ...options,
    },
    data,
    place,
  );
  const canvas = chart.root.querySelector("canvas");
  canvas.setAttribute("role", "img");
  const resized = new ResizeObserver(() => chart.setSize({ width: width(), height: HEIGHT }));
  resized.observe(place);
  const describe = (words) => canvas.setAttribute("aria-label", `${caption}: ${words || "no data yet"}`);
  const destroy = () => {
    resized.disconnect();
    chart.destroy();
  };
  return [chart, describe, destroy];
}

/** Lines over time. `lines`: [label, colour, how a value is written]; the first is filled where it is alone. */
export function overTime(id, caption, note, lines, { least = 0, atLeast = 1, write = String } = {}) {
  const series = lines.map(([label, name, value]) => ({
    label,
    stroke: colour(name),
    fill: lines.length === 1 ? colour(`${name}-faint`) : undefined,
    width: 1.5,
    points: { show: false, filter: alone, size: 5, fill: colour(name) },
    value: (_, number) => (number === null || number === undefined ? "–" : value(number)),
  }));
  const [chart, describe, destroy] = figure(
    id,
    caption,
    note,
    {
      series: [{ value: "{HH}:{mm}:{ss}" }, ...series],
      scales: { y: { range: (_, __, most) => [least, Math.max(most ?? 0, atLeast) * 1.05] } },
      axes: [
        axis({ values: [[60, "{HH}:{mm}"], [1, "{HH}:{mm}:{ss}"]], space: 70, size: 28 }),
        axis({ size: 52, values: (_, splits) => splits.map(write) }),
      ],
    },
    [[], ...lines.map(() => [])],
  );
  return {
    /** `columns`: the times, and a column for each line; null where there is nothing. */
    draw(columns, from, to) {
      chart.batch(() => {
        chart.setData(columns, false);
        chart.setScale("x", { min: from, max: to });
      });
      const last = columns[0].length - 1;
      if (chart.cursor.left < 0) chart.setLegend({ idx: last < 0 ? null : last }, false); // no cursor: the last values
      describe(lines.map((line, i) => describeLine(line, columns[i + 1])).filter(Boolean).join("; "));
    },
    destroy,
  };
}

/** Indices of points without a neighbour, which no line would show. */
function alone(chart, line) {
  const known = (i) => (chart.data[line][i] ?? null) !== null;
  return chart.data[0].map((_, i) => i).filter((i) => known(i) && !known(i - 1) && !known(i + 1));
}

/** What a line shows, for screen readers. */
function describeLine([label, , value], column) {
  const known = column.filter((number) => number !== null);
  return known.length && `${label} ${value(known.at(-1))}, at most ${value(Math.max(...known))}`;
}

/** Bars with their names and values below, of which one may be highlighted. */
export function bars(id, caption, note, { least = 0, atLeast = 1, write }) {
  const paths = uPlot.paths.bars({ size: [0.62, 44], radius: 0.12 });
  const kind = (name) => ({ paths, fill: colour(name), width: 0, points: { show: false } });
  let values = [];
  const [chart, describe, destroy] = figure(
    id,
    caption,
    note,
    {
      legend: { show: false },
      cursor: { show: false },
      series: [{}, kind("muted"), kind("accent")],
      scales: {
        x: { time: false, range: (_, first, last) => [(first ?? 0) - 0.6, (last ?? 1) + 0.6] },
        y: { range: (_, __, most) => [least, Math.max(most ?? 0, atLeast) * 1.05] },
      },
      axes: [
        axis({
          grid: { show: false },
          splits: (self) => self.data[0],
          values: (_, splits) => splits.map((name, i) => `${name}\n${write(values[i])}`),
          size: 44,
          gap: 6,
        }),
        axis({ size: 52, values: (_, splits) => splits.map(write) }),
      ],
    },
    [[], [], []],
  );
  return {
    /** `highlighted`: whether the bar of that index is. */
    draw(names, drawn, highlighted = () => true) {
      values = drawn;
      chart.setData([
        names,
        drawn.map((value, i) => (highlighted(i) ? null : value)),
        drawn.map((value, i) => (highlighted(i) ? value : null)),
      ]);
      chart.redraw(false, true); // else the values below the bars stay as they were
      describe(drawn.map((value, i) => `${names[i]} ${write(value)}`).join(", "));
    },
    destroy,
  };
}
