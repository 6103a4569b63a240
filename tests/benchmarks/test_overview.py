"""Tests of the page with all floors."""

import benchmark_files

harness = benchmark_files.import_benchmark('runtime').harness


def test_overview_has_all_floors(tmp_path):
  (tmp_path / 'first.md').write_text("""# Cost

## Seconds per round

| Round | moments | seconds | a / b | floor | met | c / d | floor | met |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
| 5 × 1 | fused | 0.5 | 1.10 (1–2) | ≤ 1.20 | yes | 3.00 | – | – |
| 5 × 2 | fused | 0.5 | 1.30 | – | – | 3.00 | < 1 | **no** |

| Round | floor |
| --- | --- |
| another table | – |

## Memory

| ratio | floor | met |
| --- | --- | --- |
| 0.9 | ≤ 1 | yes |
""")
  (tmp_path / 'second.md').write_text('# Nothing\n')
  for _ in range(2):  # The page itself is no report.
    text = harness.overview(tmp_path)
    ((header, *rows),) = benchmark_files.tables(text)
    assert header[-3:] == ['measured', 'floor', 'met']
    first = '[first](first.md)'
    seconds = 'Seconds per round'
    assert rows == [
        [first, seconds, '5 × 1, fused', 'a / b']
        + ['1.10 (1–2)', '≤ 1.20', 'yes'],
        [first, seconds, '5 × 2, fused', 'c / d'] + ['3.00', '< 1', '**no**'],
        [first, 'Memory', '', 'ratio', '0.9', '≤ 1', 'yes'],
    ]
    (tmp_path / 'README.md').write_text(text)
