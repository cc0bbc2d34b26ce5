// Moving over a chart shows that step in every chart. The page is complete without this.
const data = JSON.parse(document.getElementById("data").textContent);
const figures = [...document.querySelectorAll("figure.chart")];
const [first, last] = data.steps;

function nearest(points, step) {
  let low = 0, high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < step) low = middle; else high = middle;
  }
  return step - points[low][0] < points[high][0] - step ? points[low] : points[high];
}

function show(step) {
  figures.forEach((figure, index) => {
    const cursor = figure.querySelector(".cursor");
    const at = nearest(data.charts[index][0].points, step)[0];
    cursor.style.display = "block";
    cursor.style.left = `${(100 * (at - first)) / (last - first || 1)}%`;
    cursor.dataset.step = `step ${at.toLocaleString("en")}`;
    for (const series of data.charts[index]) {
      const output = figure.querySelector(`output[data-series="${CSS.escape(series.label)}"]`);
      if (output) output.textContent = nearest(series.points, step)[1];
    }
  });
}

function hide() {
  figures.forEach((figure, index) => {
    figure.querySelector(".cursor").style.display = "none";
    for (const series of data.charts[index]) {
      const output = figure.querySelector(`output[data-series="${CSS.escape(series.label)}"]`);
      if (output) output.textContent = series.points.at(-1)[1];
    }
  });
}

for (const figure of figures) {
  const plot = figure.querySelector(".plot");
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const part = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    show(first + part * (last - first));
  });
  plot.addEventListener("pointerleave", hide);
}
