(() => {
  'use strict';
  const report = JSON.parse(document.getElementById('data').textContent);
  const controls = document.getElementById('controls');
  const dark = window.matchMedia('(prefers-color-scheme: dark)');

  const variable = (name) =>
      getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const seriesColor = (series) =>
      dark.matches && series.color === '#000000' ? '#f2f2f2' : series.color;

  function config() {
    const text = variable('--text');
    const muted = variable('--muted');
    const line = variable('--line');
    return {
      background: 'transparent',
      font: 'system-ui, sans-serif',
      view: {stroke: null},
      axis: {
        domainColor: muted, gridColor: line, gridOpacity: 0.6,
        labelColor: text, tickColor: muted, titleColor: text,
        titleFontWeight: 'normal', labelFontSize: 12, titleFontSize: 12,
      },
      legend: {labelColor: text, titleColor: text, titleFontWeight: 'normal'},
    };
  }

  /** The series that are shown, with their numbers. */
  function shownSeries() {
    const boxes = [...controls.querySelectorAll('[name=series]')];
    const filters = [...controls.querySelectorAll('[data-filter]')];
    return report.series.filter((series, number) =>
        (!boxes.length || boxes[number].checked) &&
        filters.every(({value, dataset}) =>
            !value || series.labels[dataset.filter] === value));
  }

  function styles(shown) {
    const domain = shown.map((series) => series.name);
    return {
      color: {
        field: 'name', type: 'nominal', legend: null,
        scale: {domain, range: shown.map(seriesColor)},
      },
      strokeDash: {
        field: 'name', type: 'nominal', legend: null,
        scale: {domain, range: shown.map((series) => series.dash)},
      },
    };
  }

  /** The points of a column's curves. */
  function curvePoints(shown, column, axis) {
    const points = [];
    const silent = [];
    for (const series of shown) {
      const values = series.values[column.name];
      const x = series[axis.name];
      if (!values || !x) continue;
      const own = [];
      values.mean.forEach((mean, index) => {
        if (mean === null || x[index] === null) return;
        const deviation = values.deviation[index];
        own.push({
          name: series.name, x: x[index], mean, deviation,
          low: mean - deviation, high: mean + deviation,
          round: series.round[index],
        });
      });
      // What sends nothing is a horizontal line at its last value.
      if (axis.name !== 'round' && own.every((point) => point.x === 0)) {
        silent.push(...own.slice(-1));
      } else {
        points.push(...own.filter((point) => !axis.log || point.x > 0));
      }
    }
    const ends = points.map((point) => point.x);
    for (const point of silent) {
      for (const x of ends.length ?
           [Math.min(...ends), Math.max(...ends)] : [0]) {
        points.push({...point, x});
      }
    }
    if (column.log) {
      const smallest = Math.min(
          ...points.map((point) => point.mean).filter((mean) => mean > 0));
      for (const point of points) {
        point.low = Math.max(point.low, smallest / 2);
      }
    }
    return points;
  }

  function curves(element, shown) {
    const column = report.columns.find(
        ({name}) => name === element.dataset.column);
    const axis = report.axes.find(
        ({name}) => name === controls.elements.axis.value) || report.axes[0];
    const x = {
      field: 'x', type: 'quantitative', title: axis.title,
      scale: axis.log ? {type: 'log', nice: false} : {nice: false, zero: false},
      axis: {
        tickCount: 5, tickMinStep: axis.name === 'megabytes' ? 0 : 1,
        format: '~s', labelOverlap: true, grid: false,
      },
    };
    const scale = column.log ? {type: 'log', nice: false} : {zero: false};
    const y = (field) => ({
      field, type: 'quantitative', title: column.unit, scale,
      axis: {format: column.format, tickCount: 6, labelOverlap: true},
    });
    const {color, strokeDash} = styles(shown);
    const values = curvePoints(shown, column, axis);
    const isShort = values.length <= 10 * shown.length;
    return {
      data: {values},
      height: 280,
      layer: [
        {
          mark: {type: 'area', opacity: 0.18},
          encoding: {x, y: y('low'), y2: {field: 'high'}, color},
        },
        {
          mark: {type: 'line', strokeWidth: 2},
          encoding: {x, y: y('mean'), color, strokeDash},
        },
        {
          // Touched or pointed at, a point tells its numbers.
          mark: {type: 'circle', size: isShort ? 30 : 60,
                 opacity: isShort ? 1 : 0},
          encoding: {
            x, y: y('mean'), color,
            tooltip: [
              {field: 'name', title: 'Line'},
              {field: 'round', title: 'Round'},
              {field: 'x', title: axis.title, format: '.6~g'},
              {field: 'mean', title: 'Mean', format: '.4~f'},
              {field: 'deviation', title: 'Deviation', format: '.4~f'},
            ],
          },
        },
      ],
    };
  }

  function clients(element, shown) {
    const names = shown.map((series) => series.name);
    const values = report.clients
        .map(([number, seed, client, accuracy]) => ({
          name: report.series[number].name, seed, client, accuracy}))
        .filter(({name}) => names.includes(name));
    const x = {
      field: 'accuracy', type: 'quantitative', title: 'Accuracy',
      axis: {format: '%', tickCount: 5}, scale: {zero: false},
    };
    const y = {
      field: 'name', type: 'nominal', title: null, sort: names,
      axis: {labelLimit: element.clientWidth * 0.4},
    };
    const {color} = styles(shown);
    return {
      data: {values},
      height: 30 * Math.max(1, shown.length),
      layer: [
        {
          mark: {type: 'boxplot', extent: 'min-max', size: 16,
                 box: {opacity: 0.4}, median: {color: variable('--text')},
                 rule: {color: variable('--muted')}, ticks: false},
          encoding: {x, y, color},
        },
        {
          mark: {type: 'circle', size: 26, opacity: 0.7},
          encoding: {
            x, y, color,
            tooltip: [
              {field: 'name', title: 'Line'},
              {field: 'client', title: 'Client'},
              {field: 'seed', title: 'Seed'},
              {field: 'accuracy', title: 'Accuracy', format: '.2%'},
            ],
          },
        },
      ],
    };
  }

  function labels(element) {
    const classes = report.labels.classes;
    const values = report.labels.counts.flatMap((counts, number) =>
        counts.map((count, label) => ({
          client: report.labels.clients[number],
          label: classes ? classes[label] : label, count})));
    const height = Math.min(22, Math.max(
        3, 600 / report.labels.clients.length));
    const y = {
      field: 'client', type: 'nominal', title: 'Client', sort: null,
      axis: {labelOverlap: true, labelLimit: element.clientWidth * 0.3},
    };
    return {
      data: {values},
      height: height * report.labels.clients.length,
      mark: 'rect',
      encoding: {
        x: {field: 'label', type: 'ordinal', title: 'Class', sort: null,
            axis: {labelAngle: classes ? -45 : 0, labelLimit: 150,
                   labelOverlap: true}},
        y,
        color: {
          field: 'count', type: 'quantitative', title: 'Examples',
          scale: {
            range: dark.matches ? ['#22242a', '#7db7f5'] :
                                  ['#f2f5fa', '#08519c'],
            domainMin: 0,
          },
          legend: {orient: 'bottom', gradientLength: 160},
        },
        tooltip: [
          {field: 'client', title: 'Client'},
          {field: 'label', title: 'Class'},
          {field: 'count', title: 'Examples'},
        ],
      },
    };
  }

  const KINDS = {curve: curves, clients, labels};

  function draw() {
    const shown = shownSeries();
    for (const line of controls.querySelectorAll('[data-series]')) {
      const series = report.series[line.dataset.series];
      line.setAttribute('stroke', seriesColor(series));
      line.setAttribute('stroke-width', 3);
      line.setAttribute('stroke-dasharray', series.dash.join(' '));
    }
    for (const element of document.querySelectorAll('.chart')) {
      const spec = {
        width: element.clientWidth,
        autosize: {type: 'fit-x', contains: 'padding'},
        padding: {left: 0, top: 5, right: 12, bottom: 0},
        ...KINDS[element.dataset.kind](element, shown),
        config: config(),
      };
      const isLarge = spec.data.values.length > 4000;
      window.vegaEmbed(element, spec, {
        actions: false, mode: 'vega-lite',
        renderer: isLarge ? 'canvas' : 'svg',
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
