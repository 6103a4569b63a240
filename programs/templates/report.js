(() => {
  'use strict';
  const report = JSON.parse(document.getElementById('data').textContent);
  const controls = document.getElementById('controls');
  const dark = window.matchMedia('(prefers-color-scheme: dark)');

  /** Where the page is dark, a black line is light. */
  const themed = (text) =>
      dark.matches ? text.replaceAll('#000000', '#f2f2f2') : text;

  function shownSeries() {
    const boxes = [...controls.querySelectorAll('[name=series]')];
    const filters = [...controls.querySelectorAll('[data-filter]')];
    return report.series.filter((series, number) =>
        (!boxes.length || boxes[number].checked) &&
        filters.every(({value, dataset}) =>
            !value || series.labels[dataset.filter] === value));
  }

  function draw() {
    const shown = new Set(shownSeries().map(({name}) => name));
    const axis = controls.elements.axis.value;
    for (const line of controls.querySelectorAll('[data-series]')) {
      const series = report.series[line.dataset.series];
      line.setAttribute('stroke', themed(series.color));
      line.setAttribute('stroke-width', 3);
      line.setAttribute('stroke-dasharray', series.dash.join(' '));
    }
    for (const element of document.querySelectorAll('.chart')) {
      const chart = report.charts[element.dataset.chart];
      const values = report.data[chart.data].filter(
          ({name}) => name === undefined || shown.has(name));
      const config = report.configs[dark.matches ? 'dark' : 'light'];
      const spec = {
        width: element.clientWidth,
        autosize: {type: 'fit-x', contains: 'padding'},
        padding: {left: 0, top: 5, right: 12, bottom: 0},
        data: {values},
        ...JSON.parse(themed(JSON.stringify(
            chart.by_axis ? chart.by_axis[axis] : chart.spec))),
        // The list of lines is their legend.
        config: {...config, legend: {
          ...config.legend, disable: chart.data !== 'labels'}},
      };
      window.vegaEmbed(element, spec, {
        actions: false, mode: 'vega-lite',
        renderer: values.length > 4000 ? 'canvas' : 'svg',
      }).catch((error) => console.error(error));
    }
  }

  function sortBy(table, button) {
    const title = button.closest('th');
    const position = title.cellIndex;
    const body = table.tBodies[0];
    const text = (row) => row.cells[position].textContent.trim();
    const isText = [...body.rows].some((row) =>
        row.cells[position].classList.contains('text') &&
        Number.isNaN(Number(text(row))));
    // The largest number first, or the first word.
    const first = isText ? 'ascending' : 'descending';
    const second = isText ? 'descending' : 'ascending';
    const order =
        title.getAttribute('aria-sort') === first ? second : first;
    const sign = order === 'ascending' ? 1 : -1;
    const number = (row) => parseFloat(text(row).replace('inf', 'Infinity'));
    const rows = [...body.rows].sort((a, b) => {
      if (isText) return sign * text(a).localeCompare(text(b));
      const [x, y] = [number(a), number(b)];
      // What is no number comes last.
      if (Number.isNaN(x) || Number.isNaN(y)) {
        return Number.isNaN(x) - Number.isNaN(y);
      }
      return x === y ? 0 : sign * (x - y);
    });
    for (const other of table.tHead.rows[0].cells) {
      other.removeAttribute('aria-sort');
    }
    title.setAttribute('aria-sort', order);
    body.append(...rows);
  }

  for (const table of document.querySelectorAll('.sortable')) {
    for (const button of table.querySelectorAll('th button')) {
      button.addEventListener('click', () => sortBy(table, button));
    }
  }
  let resized = 0;
  let width = window.innerWidth;
  window.addEventListener('resize', () => {
    // Phones also report it when the address bar moves.
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    clearTimeout(resized);
    resized = setTimeout(draw, 200);
  });
  controls.addEventListener('change', draw);
  dark.addEventListener('change', draw);
  draw();
})();
