"""Shell, SQL, make and single lines of code, in the same template language as `functions`."""

from demo_corpus.dice import scenes

SHELL = scenes(r"""
#!/bin/sh
# Back up the <item> files, one archive a day, and keep the last <small>.
set -eu

day=$(date +%F)
tar -czf "backup/<item>s-$day.tar.gz" data/<item>s
ls -1t backup/<item>s-*.tar.gz | tail -n +<medium> | xargs -r rm --
---
#!/bin/sh
# Count the lines of every <item> list and print the largest first.
for list in <item>s/*.txt; do
	printf '%s\t%s\n' "$(wc -l < "$list")" "$list"
done | sort -rn | head -n <small>
---
#!/usr/bin/env bash
# Rename "<Item> 7.txt" to "<item>-007.txt".
set -euo pipefail
shopt -s nullglob

for old in "<Item> "*.txt; do
	number=${old//[^0-9]/}
	new=$(printf '<item>-%03d.txt' "$((10#$number))")
	if [[ -e $new ]]; then
		echo "$new exists, leaving $old alone" >&2
		continue
	fi
	mv -- "$old" "$new"
done
---
#!/bin/sh
# Wait until the <thing> answers, at most <medium_kept> seconds.
left=<medium_kept>
until ping -c 1 -W 1 <thing>.local > /dev/null 2>&1; do
	left=$((left - 1))
	if [ "$left" -le 0 ]; then
		echo "<thing> did not answer" >&2
		exit 1
	fi
	sleep 1
done
echo "<thing> is up"
---
#!/bin/sh
# Sum the second column of a tab-separated list of <item>s.
awk -F '\t' '
	$2 ~ /^[0-9.]+$/ { sum += $2; n++ }
	END { printf "%d <item>s, <measure> %.2f\n", n, sum }
' "${1:-<item>s.tsv}"
---
#!/bin/sh
# Greet according to the hour.
hour=$(date +%H)
case $hour in
	0[5-9] | 1[01]) echo "Good morning, <name>!" ;;
	1[2-7]) echo "Good afternoon, <name>!" ;;
	*) echo "Good night, <name>!" ;;
esac
---
#!/usr/bin/env bash
# Check that every <item> named in the list is there; print what is missing.
missing=0
while IFS= read -r name; do
	[[ -f <item>s/$name ]] && continue
	echo "missing: $name"
	missing=$((missing + 1))
done < <item>s.txt
echo "$missing missing"
(( missing == 0 ))
---
#!/bin/sh
# Make a folder for each month of <year>.
for month in 01 02 03 04 05 06 07 08 09 10 11 12; do
	mkdir -p "<item>s/<year>-$month"
done
cat > "<item>s/README" << 'EOF_README'
One folder a month.
	Put the <measure>s of <place> into them.
EOF_README
""")

SQL = scenes("""
-- What we know about each <item>.
CREATE TABLE <item>s (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    <measure> INTEGER NOT NULL CHECK (<measure> >= 0),
    place TEXT DEFAULT '<place>'
);

INSERT INTO <item>s (name, <measure>) VALUES
    ('<colour> <item>', <medium>),
    ('<material> <item>', <large>);
---
-- The <small> places with the largest <measure>.
SELECT place, COUNT(*) AS number, SUM(<measure>) AS total
FROM <item>s
GROUP BY place
HAVING COUNT(*) > 1
ORDER BY total DESC, place
LIMIT <small>;
---
-- People who never bought a <item>.
SELECT people.name
FROM people
LEFT JOIN orders ON orders.person = people.id AND orders.thing = '<item>'
WHERE orders.id IS NULL
ORDER BY people.name;
---
-- Share of each <item> in the whole <measure>, in percent.
SELECT name,
       <measure>,
       ROUND(100.0 * <measure> / SUM(<measure>) OVER (), 1) AS percent
FROM <item>s
ORDER BY percent DESC;
---
-- <Name> moved to <place>.
BEGIN;
UPDATE people SET place = '<place>' WHERE name = '<name>';
INSERT INTO moves (name, place, day) VALUES ('<name>', '<place>', '<year>-0<small>-<day>');
COMMIT;
---
-- Running <measure> of the <item>s, day by day.
SELECT day,
       <measure>,
       SUM(<measure>) OVER (ORDER BY day ROWS UNBOUNDED PRECEDING) AS so_far
FROM deliveries
WHERE thing = '<item>' AND day >= '<year>-01-01';
---
-- Each <item> with the one before it, to see by how much the <measure> grew.
WITH numbered AS (
    SELECT name, <measure>, ROW_NUMBER() OVER (ORDER BY <measure>) AS n
    FROM <item>s
)
SELECT b.name, b.<measure> - a.<measure> AS step
FROM numbered AS a
JOIN numbered AS b ON b.n = a.n + 1
ORDER BY step DESC;
---
-- Old offers go; what was ordered stays.
DELETE FROM offers
WHERE day < '<year>-0<small>-01'
  AND NOT EXISTS (SELECT 1 FROM orders WHERE orders.offer = offers.id);
---
CREATE VIEW heavy_<item>s AS
SELECT name, <measure> FROM <item>s WHERE <measure> > <large>;
---
CREATE INDEX <item>s_by_<measure> ON <item>s (<measure> DESC);
ANALYZE <item>s;
""")

MAKE = scenes("""
# Grind every list of <item>s into one report.
LISTS := $(wildcard <item>s/*.txt)

.PHONY: all clean

all: report.html

report.html: $(LISTS) report.py
	python report.py $(LISTS) > $@

clean:
	rm -f report.html
---
CFLAGS := -O<digit> -Wall -Wextra

<item>: <item>.o <thing>.o
	$(CC) $(CFLAGS) -o $@ $^

%.o: %.c <item>.h
	$(CC) $(CFLAGS) -c $<

.PHONY: check
check: <item>
	./<item> --self-test
---
.PHONY: serve
serve:
	@echo "<place> on port 80<medium_kept>"
	python -m http.server 80<medium_kept> --directory <item>s
---
# <Name>'s notes: one PDF for each page of Markdown.
%.pdf: %.md
	pandoc --from markdown --output $@ $<
---
# settings of the <item> counter
[<item>]
<measure> = <medium>
colour = "<colour>"
places = ["<place>", "Weir", "Lock"]

[<item>.limits]
least = <small>
most = <large>
---
{
  "<item>": {"<measure>": <medium>, "material": "<material>"},
  "<thing>": {"<measure>": <small>, "material": "<material>"},
  "owner": "<name>"
}
""")

PYTHON_LINES = scenes("""
def double(<measure>): return 2 * <measure>
---
<item>s = sorted(<item>s, key=lambda <item>: <item>.<measure>)
---
assert <small> + <small> > <digit>, "<item>s went missing"
---
for <item> in range(<small>): print("<thing>", <item>)
---
<measure> = max(0, <measure> - <medium>)  # a <item> has no negative <measure>
---
print(f"{<measure>:>8.2f} {<item>}")
---
total = sum(<item>.<measure> for <item> in <item>s if <item>.colour == "<colour>")
---
# TODO(<name>): what if there is no <item>?
---
squares = {n: n * n for n in range(<small>, <medium>)}
---
if __name__ == "__main__": raise SystemExit(main("<item>"))
---
from <thing> import <item>
---
<item> = <thing>["<measure>"] if "<measure>" in <thing> else <small>
---
λ = lambda <item>: <item> ** <small>
---
longest = max(<item>s, key=len, default="<item>")
---
first, *rest = open("<item>s.txt", encoding="utf-8").read().split()
---
<measure>, remainder = divmod(<large>, <small>)
""")

SHELL_LINES = scenes("""
grep -rn "<item>" notes/ | wc -l
---
find <item>s -name '*.txt' -mtime -<small>
---
sort -t, -k<digit> -n <item>s.csv | head -<small>
---
cut -f<digit> <item>s.tsv | sort | uniq -c | sort -rn
---
export MILL_HOME="$HOME/<thing>"  # at <place>
---
tar -xzf <item>s.tar.gz -C <thing>/
---
wc -c *.<item> | tail -1
---
test -s <item>s.txt || echo "no <item>s today" >&2
---
sed -i 's/<item>/<thing>/g' notes/<year>.txt
---
watch -n <medium> 'ls <item>s | wc -l'
""")

SQL_LINES = scenes("""
SELECT MAX(<measure>) FROM <item>s;
---
DELETE FROM <item>s WHERE <measure> < <small>;
---
ALTER TABLE <item>s ADD COLUMN <measure> INTEGER DEFAULT <small>;
---
SELECT DISTINCT place FROM <item>s WHERE place LIKE '<letter>%';
---
INSERT INTO <item>s (name, <measure>) VALUES ('<material> <item>', <medium>);
---
UPDATE <item>s SET <measure> = <measure> + <small> WHERE place = '<place>';
---
DROP VIEW IF EXISTS heavy_<item>s;
---
SELECT COUNT(*) FROM <item>s WHERE <measure> BETWEEN <small> AND <medium>;
""")

CONTROL_STRINGS = (
    '''# The separator is written here as text; it must stay text when this file is itself tokenized.
SEPARATOR = "<|endoftext|>"


def join_documents(documents):
    """Put the separator between documents, for a tool that wants one long string.

    >>> join_documents(["one", "two"])
    'one<|endoftext|>two'
    """
    return SEPARATOR.join(documents)''',
    "grep -c '<|endoftext|>' corpus.txt  # how many documents mention it?",
)
