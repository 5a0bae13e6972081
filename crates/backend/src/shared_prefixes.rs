//! Prefixes of keys and values that rows of a step share.

use std::ops::Range;

/// Rows of one new token whose contexts begin with the same blocks, so that attention can read the
/// keys and values in those once for all of them (cascade attention).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SharedPrefixes {
    prefixes: Vec<SharedPrefix>,
    /// Rows, one prefix's after the other's.
    rows: Vec<u32>,
    /// Working memory: rows in the order of their tables.
    order: Vec<u32>,
}

/// One of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedPrefix {
    /// A multiple of the rule's [`PrefixRule::unit`].
    pub num_tokens: usize,
    /// First of its rows among all rows that share something.
    first: usize,
    num_rows: usize,
}

/// When a device would rather be told of shared prefixes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefixRule {
    /// Prefixes are multiples of so many tokens; whole blocks.
    pub unit: usize,
    /// Rows that one reading of a prefix costs as much as: fewer, or as many, need not share one.
    pub rows_of_reading: usize,
    /// Fewest tokens of keys and values that a step saves by all prefixes.
    pub min_saved: usize,
}

/// What a step knows of its rows' contexts.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct RowTables<'a> {
    /// First token of each row, and the end.
    pub row_starts: &'a [u32],
    pub context_lens: &'a [u32],
    /// First of each row's `blocks`, and the end.
    pub block_starts: &'a [u32],
    pub blocks: &'a [u32],
    pub block_size: usize,
}

impl SharedPrefixes {
    /// Most prefixes of a step.
    pub const MAX: usize = 16;
    /// Words of a prefix and of one of its rows; see [`crate::step`].
    pub const WORDS: usize = 3;
    /// As above.
    pub const ROW_WORDS: usize = 2;

    /// Forgets all.
    pub fn clear(&mut self) {
        self.prefixes.clear();
        self.rows.clear();
    }

    /// The prefixes.
    pub fn prefixes(&self) -> &[SharedPrefix] {
        &self.prefixes
    }

    /// The rows that share a prefix, in the order of the batch or any other.
    pub fn rows(&self, prefix: &SharedPrefix) -> &[u32] {
        &self.rows[prefix.first..][..prefix.num_rows]
    }

    /// How many rows share something.
    pub fn num_rows(&self) -> usize {
        self.rows.len()
    }

    /// Tokens that rows need not read for themselves: all but one row of each prefix.
    pub fn num_spared_tokens(&self) -> usize {
        self.prefixes.iter().map(|prefix| (prefix.num_rows - 1) * prefix.num_tokens).sum()
    }

    /// Finds the prefixes that save most. A row has one at most, and keeps its newest token, which
    /// the step itself writes, for itself.
    pub fn find(&mut self, tables: RowTables<'_>, rule: PrefixRule) {
        self.clear();
        let per_unit = rule.unit / tables.block_size;
        let mut order = std::mem::take(&mut self.order);
        order.clear();
        order.extend((0..to_word(tables.context_lens.len())).filter(|row| tables.decodes(*row)));
        order.sort_by(|a, b| tables.shareable(*a, rule.unit).cmp(tables.shareable(*b, rule.unit)));
        let common: Vec<usize> = order
            .windows(2)
            .map(|pair| {
                let [a, b] = [0, 1].map(|i| tables.shareable(pair[i], rule.unit));
                a.iter().zip(b).take_while(|(a, b)| a == b).count() / per_unit
            })
            .collect();
        let mut found = Vec::new();
        best_cut(&common, 0..order.len(), rule.rows_of_reading, &mut found);
        found.sort_by_key(|cut| std::cmp::Reverse(cut.saved(rule.rows_of_reading)));
        found.truncate(Self::MAX);
        let saved: usize = found.iter().map(|cut| cut.saved(rule.rows_of_reading)).sum();
        if saved > 0 && saved * rule.unit >= rule.min_saved {
            for cut in found {
                self.push(cut.depth * rule.unit, &order[cut.rows]);
            }
        }
        self.order = order;
    }

    /// Adds a prefix of so many tokens that these rows share.
    pub fn push(&mut self, num_tokens: usize, rows: &[u32]) {
        let (first, num_rows) = (self.rows.len(), rows.len());
        self.prefixes.push(SharedPrefix { num_tokens, first, num_rows });
        self.rows.extend_from_slice(rows);
    }

    /// Writes the sections of [`crate::step`].
    pub(crate) fn pack(&self, prefixes: &mut [u32], rows: &mut [u32]) {
        for (words, prefix) in prefixes.chunks_exact_mut(Self::WORDS).zip(&self.prefixes) {
            let SharedPrefix { num_tokens, first, num_rows } = *prefix;
            words.copy_from_slice(&[num_tokens, first, num_rows].map(to_word));
        }
        let owners = self.prefixes.iter().enumerate();
        let owners = owners.flat_map(|(i, prefix)| std::iter::repeat_n(i, prefix.num_rows));
        let entries = rows.chunks_exact_mut(Self::ROW_WORDS).zip(&self.rows).zip(owners);
        for ((words, row), prefix) in entries {
            words.copy_from_slice(&[*row, to_word(prefix)]);
        }
    }

    /// Reads what [`SharedPrefixes::pack`] wrote.
    pub fn unpack(prefixes: &[u32], rows: &[u32]) -> Self {
        let prefix = |words: &[u32]| SharedPrefix {
            num_tokens: words[0] as usize,
            first: words[1] as usize,
            num_rows: words[2] as usize,
        };
        Self {
            prefixes: prefixes.chunks_exact(Self::WORDS).map(prefix).collect(),
            rows: rows.chunks_exact(Self::ROW_WORDS).map(|words| words[0]).collect(),
            order: Vec::new(),
        }
    }
}

impl<'a> RowTables<'a> {
    /// Whether a row has one new token.
    fn decodes(&self, row: u32) -> bool {
        let row = row as usize;
        self.row_starts[row + 1] - self.row_starts[row] == 1
    }

    /// The blocks that a row may share: whole units in front of its newest token.
    fn shareable(&self, row: u32, unit: usize) -> &'a [u32] {
        let row = row as usize;
        let before = (self.context_lens[row] as usize).saturating_sub(1);
        let num_blocks = before / unit * (unit / self.block_size);
        &self.blocks[self.block_starts[row] as usize..][..num_blocks]
    }
}

/// Neighbours in the order of tables that share `depth` units.
struct Cut {
    rows: Range<usize>,
    depth: usize,
}

impl Cut {
    /// Units that need not be read again.
    fn saved(&self, rows_of_reading: usize) -> usize {
        self.rows.len().saturating_sub(rows_of_reading) * self.depth
    }
}

/// Adds the cuts within `rows` that save most; says how much that is. `common[i]`: units that rows
/// `i` and `i + 1` share.
///
/// Either all rows share what they have in common, or they fall apart where they have the least.
fn best_cut(
    common: &[usize],
    rows: Range<usize>,
    rows_of_reading: usize,
    found: &mut Vec<Cut>,
) -> usize {
    if rows.len() <= rows_of_reading.max(1) {
        return 0;
    }
    let within = &common[rows.start..rows.end - 1];
    let depth = within.iter().copied().min().expect("there are two rows at least");
    let before = found.len();
    let mut start = rows.start;
    let mut apart = 0;
    let ends = within.iter().enumerate().filter(|(_, common)| **common == depth);
    let ends = ends.map(|(i, _)| rows.start + i + 1).chain([rows.end]);
    for end in ends {
        apart += best_cut(common, start..end, rows_of_reading, found);
        start = end;
    }
    let all = Cut { rows, depth };
    let together = all.saved(rows_of_reading);
    if together >= apart && together > 0 {
        found.truncate(before);
        found.push(all);
        return together;
    }
    apart
}

fn to_word(value: usize) -> u32 {
    u32::try_from(value).expect("rows and tokens of a step fit 32 bits")
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    const BLOCK: usize = 16;
    const RULE: PrefixRule = PrefixRule { unit: 64, rows_of_reading: 2, min_saved: 0 };

    struct Rows {
        row_starts: Vec<u32>,
        context_lens: Vec<u32>,
        block_starts: Vec<u32>,
        blocks: Vec<u32>,
    }

    impl Rows {
        /// Rows of one new token: blocks, and tokens of the context.
        fn new(rows: &[(Vec<u32>, usize)]) -> Self {
            let (mut blocks, mut block_starts) = (Vec::new(), vec![0]);
            for (table, context_len) in rows {
                assert!(table.len() * BLOCK >= *context_len, "a block for every token");
                blocks.extend_from_slice(table);
                block_starts.push(blocks.len() as u32);
            }
            Self {
                row_starts: (0..=rows.len() as u32).collect(),
                context_lens: rows.iter().map(|(_, len)| *len as u32).collect(),
                block_starts,
                blocks,
            }
        }

        fn tables(&self) -> RowTables<'_> {
            RowTables {
                row_starts: &self.row_starts,
                context_lens: &self.context_lens,
                block_starts: &self.block_starts,
                blocks: &self.blocks,
                block_size: BLOCK,
            }
        }

        fn find(&self, rule: PrefixRule) -> Vec<(usize, Vec<u32>)> {
            let mut found = SharedPrefixes::default();
            found.find(self.tables(), rule);
            let prefixes = found.prefixes().iter();
            let mut all: Vec<_> = prefixes
                .map(|prefix| {
                    let mut rows = found.rows(prefix).to_vec();
                    rows.sort_unstable();
                    (prefix.num_tokens, rows)
                })
                .collect();
            all.sort();
            all
        }
    }

    /// `shared` blocks from `first` on, then blocks of its own from `own` on.
    fn table(first: u32, shared: u32, own: u32, num_own: u32) -> Vec<u32> {
        (first..first + shared).chain(own..own + num_own).collect()
    }

    #[test]
    fn rows_share_whole_units_in_front_of_their_newest_token() {
        // 9 blocks are 144 tokens: two units of 64.
        let row = |i: u32| (table(0, 9, 100 * i, 3), 9 * BLOCK + 20);
        let rows = Rows::new(&[row(1), row(2), row(3)]);
        assert_eq!(rows.find(RULE), [(128, vec![0, 1, 2])]);
        // The newest of 129 tokens is the first one behind; that of 128 is among them.
        let short = |len| Rows::new(&[row(1), row(2), (table(0, 9, 0, 0), len)]);
        assert_eq!(short(129).find(RULE), [(128, vec![0, 1, 2])]);
        assert_eq!(short(128).find(RULE), [(64, vec![0, 1, 2])]);
    }

    #[test]
    fn rows_of_several_tokens_and_pairs_share_nothing() {
        let row = |i: u32| (table(0, 9, 100 * i, 3), 9 * BLOCK + 20);
        let mut rows = Rows::new(&[row(1), row(2), row(3)]);
        rows.row_starts = vec![0, 1, 2, 4];
        assert_eq!(rows.find(RULE), []);
    }

    #[test]
    fn rows_part_where_that_saves_more() {
        // Six rows share 64 tokens, three and three of them 640 each.
        let row = |half: u32, i: u32| {
            let mut table = table(0, 4, 1000 * (half + 1), 36);
            table.push(5000 + i);
            (table, 40 * BLOCK + 1)
        };
        let rows = Rows::new(&[row(0, 0), row(1, 1), row(0, 2), row(1, 3), row(0, 4), row(1, 5)]);
        assert_eq!(rows.find(RULE), [(640, vec![0, 2, 4]), (640, vec![1, 3, 5])]);
    }

    #[test]
    fn little_is_not_worth_it() {
        let row = |i: u32| (table(0, 9, 100 * i, 3), 9 * BLOCK + 20);
        let rows = Rows::new(&[row(1), row(2), row(3), row(4)]);
        // Reading 128 tokens once costs two rows' worth and spares four: 256 are saved.
        assert_eq!(rows.find(PrefixRule { min_saved: 256, ..RULE }).len(), 1);
        assert_eq!(rows.find(PrefixRule { min_saved: 257, ..RULE }), []);
    }

    /// The most that any choice of prefixes saves, by trying all: rows that agree up to a depth
    /// either share it or part.
    fn most(rows: &[Vec<u32>], depth: usize) -> usize {
        let together = rows.len().saturating_sub(RULE.rows_of_reading) * depth;
        let mut parts: HashMap<&[u32], Vec<Vec<u32>>> = HashMap::new();
        let per_unit = RULE.unit / BLOCK;
        for row in rows {
            if let Some(next) = row.get(depth * per_unit..(depth + 1) * per_unit) {
                parts.entry(next).or_default().push(row.clone());
            }
        }
        together.max(parts.values().map(|part| most(part, depth + 1)).sum())
    }

    proptest! {
        #[test]
        fn what_is_found_is_shared_and_saves_most(
            // Each row: which of two ways it goes at each unit, and tokens behind.
            rows in prop::collection::vec((prop::collection::vec(0..2u32, 0..4), 1..80usize), 1..12)
        ) {
            // A block is named by its row's way up to it.
            let tables: Vec<_> = rows.iter().enumerate().map(|(row, (ways, behind))| {
                let mut table = Vec::new();
                for unit in 0..ways.len() {
                    let way = ways[..=unit].iter().fold(1, |way, turn| 2 * way + turn);
                    table.extend((0..4).map(|i| 4 * way + i));
                }
                let own = behind.div_ceil(BLOCK) as u32;
                table.extend((0..own).map(|i| 1000 + 10 * row as u32 + i));
                (table, 64 * ways.len() + behind)
            }).collect();
            let found = Rows::new(&tables).find(RULE);
            let shareable: Vec<_> = tables.iter().zip(&rows).map(|((table, _), (ways, behind))| {
                let units = ways.len() + (behind - 1) / 64;
                table[..4 * units].to_vec()
            }).collect();
            let mut owners = vec![0; rows.len()];
            let mut saved = 0;
            for (num_tokens, members) in &found {
                let blocks = |row: u32| &shareable[row as usize][..num_tokens / BLOCK];
                for row in members {
                    prop_assert_eq!(blocks(*row), blocks(members[0]));
                    owners[*row as usize] += 1;
                }
                saved += (members.len() - RULE.rows_of_reading) * num_tokens / RULE.unit;
            }
            prop_assert!(owners.iter().all(|owners| *owners <= 1));
            prop_assert_eq!(saved, most(&shareable, 0));
        }
    }

    #[test]
    fn packed_words_are_read_back() {
        let mut all = SharedPrefixes::default();
        all.push(128, &[4, 2, 7]);
        all.push(64, &[0, 1]);
        let (mut prefixes, mut rows) = ([9; 6], [9; 10]);
        all.pack(&mut prefixes, &mut rows);
        assert_eq!(prefixes, [128, 0, 3, 64, 3, 2]);
        assert_eq!(rows, [4, 0, 2, 0, 7, 0, 0, 1, 1, 1]);
        assert_eq!(SharedPrefixes::unpack(&prefixes, &rows), all);
        assert_eq!(all.num_spared_tokens(), 2 * 128 + 64);
    }
}
