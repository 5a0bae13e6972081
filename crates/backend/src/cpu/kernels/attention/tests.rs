//! Attention against a naive oracle in f64, and the invariance of its bits.

use half::{bf16, f16};
use proptest::prelude::*;

use super::*;
use crate::cpu::kernels::kv::{Fp8, Int4, Int8, read_head, write_head};
use crate::cpu::kernels::testing::{assert_close, at_every_level, bits, normal};

/// A sequence's queries, keys and values for positions `0..len`, head by head.
struct Sequence {
    /// `[len, num_heads, head_dim]`.
    queries: Vec<f32>,
    /// `[len, num_kv_heads, head_dim]`.
    keys: Vec<f32>,
    /// `[len, num_kv_heads, head_dim]`.
    values: Vec<f32>,
    len: usize,
}

impl Sequence {
    fn new(seed: u64, attention: &AttentionShape, len: usize) -> Self {
        let kv_len = len * attention.num_kv_heads * attention.head_dim;
        Self {
            // Spread enough that the greatest score changes from tile to tile.
            queries: normal(seed, len * attention.q_len()).iter().map(|x| x * 2.0).collect(),
            keys: normal(seed + 1, kv_len),
            values: normal(seed + 2, kv_len),
            len,
        }
    }
}

/// One row of a batch: the last `new` of the first `context` tokens of a sequence.
#[derive(Clone, Copy)]
struct Row {
    sequence: usize,
    context: usize,
    new: usize,
}

struct Setup<'a> {
    attention: AttentionShape,
    window: Option<usize>,
    sequences: &'a [Sequence],
}

impl Setup<'_> {
    fn scale(&self) -> f32 {
        (self.attention.head_dim as f32).sqrt().recip()
    }

    /// Runs a batch. Every element of the cache that no row sees is NaN, and blocks are scattered.
    fn run<K: KvElement>(&self, cores: Cores<'_>, rows: &[Row]) -> Vec<Vec<f32>> {
        let AttentionShape { num_heads, num_kv_heads, head_dim, block_size } = self.attention;
        let num_blocks: usize = rows.iter().map(|row| row.context.div_ceil(block_size) + 1).sum();
        let mut unused: Vec<u32> = (0..num_blocks as u32).collect();
        let layout = KvLayout::new(K::DTYPE, self.attention);
        let strip_len = layout.strip_bytes() / size_of::<K>();
        let mut keys = broken_strip::<K>(&layout).repeat(num_blocks * num_kv_heads);
        let mut values = keys.clone();
        let (mut qkv, mut row_starts, mut context_lens) = (Vec::new(), vec![0], Vec::new());
        let (mut block_starts, mut blocks) = (vec![0], Vec::new());
        for row in rows {
            let sequence = &self.sequences[row.sequence];
            assert!(row.new <= row.context && row.context <= sequence.len);
            let first = row.context - row.new;
            for position in first..row.context {
                let q_len = num_heads * head_dim;
                qkv.extend_from_slice(&sequence.queries[position * q_len..][..q_len]);
                qkv.extend(vec![f32::NAN; 2 * num_kv_heads * head_dim]);
            }
            row_starts.push((qkv.len() / self.attention.qkv_len()) as u32);
            context_lens.push(row.context as u32);
            let seen = visible(first, self.window).start;
            for entry in 0..row.context.div_ceil(block_size) {
                let block = unused.swap_remove(entry * 7 % unused.len());
                // A block behind every window may belong to somebody else, or to nobody.
                let gone = (entry + 1) * block_size <= seen;
                blocks.push(if gone { u32::MAX } else { block });
                for offset in 0..block_size {
                    let position = entry * block_size + offset;
                    if position < seen || position >= row.context {
                        continue;
                    }
                    for head in 0..num_kv_heads {
                        let from = (position * num_kv_heads + head) * head_dim;
                        let strip = (block as usize * num_kv_heads + head) * strip_len;
                        for (x, cache) in
                            [(&sequence.keys, &mut keys), (&sequence.values, &mut values)]
                        {
                            let head = &x[from..from + head_dim];
                            write_head(&layout, offset, head, &mut cache[strip..strip + strip_len]);
                        }
                    }
                }
            }
            block_starts.push(blocks.len() as u32);
        }
        let num_tokens = row_starts[rows.len()] as usize;
        let mut out = vec![f32::NAN; num_tokens * num_heads * head_dim];
        attention(
            cores,
            Attention {
                qkv: &qkv,
                keys: &keys,
                values: &values,
                out: &mut out,
                attention: self.attention,
                scale: self.scale(),
                window: self.window,
                row_starts: &row_starts,
                context_lens: &context_lens,
                block_starts: &block_starts,
                blocks: &blocks,
                num_rows: rows.len(),
            },
        );
        let q_len = num_heads * head_dim;
        let bounds = row_starts.windows(2).map(|pair| (pair[0] as usize, pair[1] as usize));
        bounds.map(|(start, end)| out[start * q_len..end * q_len].to_vec()).collect()
    }

    /// What a row should give, by definition.
    fn oracle<K: KvElement>(&self, row: Row) -> Vec<f64> {
        let AttentionShape { num_heads, num_kv_heads, head_dim, .. } = self.attention;
        let sequence = &self.sequences[row.sequence];
        let stored = |x: &[f32], position: usize, head: usize| -> Vec<f64> {
            let from = (position * num_kv_heads + head) * head_dim;
            let layout = KvLayout { dtype: K::DTYPE, num_kv_heads: 1, block_size: 1, head_dim };
            let mut strip = vec![K::default(); layout.strip_bytes() / size_of::<K>()];
            let mut head = vec![0.0; head_dim];
            write_head(&layout, 0, &x[from..from + head_dim], &mut strip);
            read_head(&layout, 0, &strip, &mut head);
            head.into_iter().map(f64::from).collect()
        };
        let mut out = Vec::new();
        for position in row.context - row.new..row.context {
            for head in 0..num_heads {
                let kv_head = head / (num_heads / num_kv_heads);
                let query = &sequence.queries[(position * num_heads + head) * head_dim..];
                let seen = visible(position, self.window);
                let scores: Vec<f64> = seen
                    .clone()
                    .map(|position| {
                        let key = stored(&sequence.keys, position, kv_head);
                        let dot: f64 = query.iter().zip(&key).map(|(q, k)| f64::from(*q) * k).sum();
                        dot * f64::from(self.scale())
                    })
                    .collect();
                let max = scores.iter().copied().fold(f64::MIN, f64::max);
                let total: f64 = scores.iter().map(|score| (score - max).exp()).sum();
                let mut sums = vec![0.0; head_dim];
                for (score, position) in scores.iter().zip(seen) {
                    let value = stored(&sequence.values, position, kv_head);
                    for (sum, value) in sums.iter_mut().zip(value) {
                        *sum += (score - max).exp() / total * value;
                    }
                }
                out.extend(sums);
            }
        }
        out
    }

    fn check<K: KvElement>(&self, cores: Cores<'_>, rows: &[Row]) {
        for (row, got) in rows.iter().zip(self.run::<K>(cores, rows)) {
            assert_close(&got, &self.oracle::<K>(*row), 1e-5);
        }
    }
}

/// A strip whose numbers, or whose scales, are NaN.
fn broken_strip<K: KvElement>(layout: &KvLayout) -> Vec<K> {
    let mut strip = vec![K::default(); layout.strip_bytes() / size_of::<K>()];
    let (numbers, scales) = strip.split_at_mut(layout.codes_bytes() / size_of::<K>());
    if layout.scale_bytes() == 0 {
        K::narrow(&vec![f32::NAN; numbers.len()], numbers);
    }
    for scale in scales.chunks_exact_mut(size_of::<f32>()) {
        K::set_scale(f32::NAN, scale);
    }
    strip
}

fn shape(heads: usize, kv_heads: usize, head_dim: usize, block_size: usize) -> AttentionShape {
    AttentionShape { num_heads: heads, num_kv_heads: kv_heads, head_dim, block_size }
}

fn row(sequence: usize, context: usize, new: usize) -> Row {
    Row { sequence, context, new }
}

#[test]
fn every_shape_of_head_agrees_with_the_definition() {
    for (heads, kv_heads) in [(2, 2), (3, 1), (9, 3), (8, 2)] {
        for head_dim in [64, 80, 96, 128] {
            let attention = shape(heads, kv_heads, head_dim, 16);
            let sequences = [10, 20].map(|seed| Sequence::new(seed, &attention, 150));
            let setup = Setup { attention, window: None, sequences: &sequences };
            let rows = [row(0, 1, 1), row(1, 150, 1), row(0, 77, 40), row(1, 64, 64)];
            at_every_level(|cores| {
                setup.check::<f32>(cores, &rows);
                setup.check::<f16>(cores, &rows);
                setup.check::<bf16>(cores, &rows);
                setup.check::<Int8>(cores, &rows);
                setup.check::<Fp8>(cores, &rows);
                setup.check::<Int4>(cores, &rows);
            });
        }
    }
}

#[test]
fn small_and_odd_heads_and_blocks_work() {
    for (head_dim, block_size) in [(8, 1), (20, 3), (33, 100), (64, 256)] {
        let attention = shape(4, 2, head_dim, block_size);
        let sequences = [Sequence::new(5, &attention, 200)];
        let setup = Setup { attention, window: None, sequences: &sequences };
        at_every_level(|cores| {
            setup.check::<f16>(cores, &[row(0, 200, 3), row(0, 130, 130)]);
            setup.check::<Int8>(cores, &[row(0, 200, 3), row(0, 130, 130)]);
            setup.check::<Int4>(cores, &[row(0, 200, 3), row(0, 130, 130)]);
        });
    }
}

#[test]
fn windows_hide_what_is_behind_them() {
    for window in [1, 2, 63, 64, 65, 100, 1000] {
        let attention = shape(6, 2, 64, 16);
        let sequences = [Sequence::new(6, &attention, 400)];
        let setup = Setup { attention, window: Some(window), sequences: &sequences };
        let rows = [row(0, 400, 1), row(0, 400, 100), row(0, 300, 300), row(0, 65, 2)];
        at_every_level(|cores| setup.check::<f16>(cores, &rows));
    }
}

#[test]
fn long_contexts_agree_with_the_definition_whether_spread_or_not() {
    let attention = shape(3, 1, 64, 32);
    let sequences = [Sequence::new(7, &attention, 3 * SPLIT + 70)];
    for window in [None, Some(SPLIT + 300)] {
        let setup = Setup { attention, window, sequences: &sequences };
        let long = [row(0, 3 * SPLIT + 70, 2), row(0, SPLIT, 1), row(0, SPLIT + 1, 1)];
        let many: Vec<Row> = (0..20).map(|_| long[0]).collect();
        at_every_level(|cores| {
            setup.check::<f16>(cores, &long);
            let (few, many) = (setup.run::<f16>(cores, &long[..1]), setup.run::<f16>(cores, &many));
            for row in many {
                assert_eq!(bits(&row), bits(&few[0]));
            }
        });
    }
}

/// The output of a whole prefill, and of the same prefill cut at `cuts`.
fn check_chunks<K: KvElement>(setup: &Setup<'_>, cores: Cores<'_>, len: usize, cuts: &[usize]) {
    let whole = setup.run::<K>(cores, &[row(0, len, len)]).concat();
    let mut pieces = Vec::new();
    let mut start = 0;
    for end in cuts.iter().copied().chain([len]) {
        pieces.extend(setup.run::<K>(cores, &[row(0, end, end - start)]).concat());
        start = end;
    }
    assert_eq!(bits(&pieces), bits(&whole), "cut at {cuts:?} of {len}");
}

#[test]
fn cutting_a_prefill_changes_no_bit() {
    for (heads, kv_heads, head_dim) in [(9, 3, 64), (4, 4, 80), (8, 1, 128)] {
        for window in [None, Some(70)] {
            let attention = shape(heads, kv_heads, head_dim, 16);
            let sequences = [Sequence::new(8, &attention, 200)];
            let setup = Setup { attention, window, sequences: &sequences };
            at_every_level(|cores| {
                let one_by_one: Vec<usize> = (1..200).collect();
                check_chunks::<f16>(&setup, cores, 200, &one_by_one);
                check_chunks::<f32>(&setup, cores, 200, &[64, 128]);
                check_chunks::<bf16>(&setup, cores, 200, &[1, 63, 65, 131, 199]);
                check_chunks::<Fp8>(&setup, cores, 200, &[1, 64, 199]);
            });
        }
    }
}

/// A later token's infinite value must not reach earlier tokens as zero times infinity.
#[test]
fn broken_later_tokens_do_not_touch_earlier_ones() {
    let attention = shape(9, 3, 64, 16);
    let mut broken = Sequence::new(9, &attention, 100);
    broken.values[80 * 3 * 64..].fill(f32::INFINITY);
    broken.keys[90 * 3 * 64..].fill(f32::NAN);
    let sequences = [broken];
    let setup = Setup { attention, window: None, sequences: &sequences };
    at_every_level(|cores| {
        let whole = setup.run::<f16>(cores, &[row(0, 100, 100)]).concat();
        let before = setup.run::<f16>(cores, &[row(0, 80, 80)]).concat();
        assert!(before.iter().all(|x| x.is_finite()));
        assert_eq!(bits(&whole[..before.len()]), bits(&before));
    });
}

#[test]
fn equal_scores_average_the_values() {
    let attention = shape(1, 1, 64, 16);
    let mut sequence = Sequence::new(1, &attention, 130);
    sequence.queries.fill(0.0);
    for (position, value) in sequence.values.chunks_mut(64).enumerate() {
        value.fill(position as f32);
    }
    let sequences = [sequence];
    let setup = Setup { attention, window: None, sequences: &sequences };
    at_every_level(|cores| {
        let out = setup.run::<f32>(cores, &[row(0, 130, 130)]).concat();
        for (position, out) in out.chunks(64).enumerate() {
            assert_close(out, &[position as f64 / 2.0; 64], 1e-6);
        }
    });
}

#[test]
fn empty_batches_and_rows_without_new_tokens_do_nothing() {
    let attention = shape(2, 1, 64, 16);
    let sequences = [Sequence::new(1, &attention, 10)];
    let setup = Setup { attention, window: None, sequences: &sequences };
    at_every_level(|cores| {
        assert!(setup.run::<f32>(cores, &[]).is_empty());
        let out = setup.run::<f32>(cores, &[row(0, 5, 0), row(0, 5, 1)]);
        assert!(out[0].is_empty());
        assert_close(&out[1], &setup.oracle::<f32>(row(0, 5, 1)), 1e-5);
    });
}

#[derive(Clone, Debug)]
struct Batch {
    heads: (usize, usize),
    head_dim: usize,
    block_size: usize,
    window: Option<usize>,
    /// `(context, new)` of each row.
    rows: Vec<(usize, usize)>,
}

fn batches() -> impl Strategy<Value = Batch> {
    let heads = prop::sample::select(vec![(1, 1), (3, 1), (4, 1), (6, 2), (9, 3)]);
    let head_dims = prop::sample::select(vec![16, 40, 64, 80, 128]);
    let row = (1_usize..300)
        .prop_flat_map(|context| (Just(context), 1..=context))
        .prop_map(|(context, new)| (context, if context % 3 == 0 { 1 } else { new }));
    let rows = prop::collection::vec(row, 1..6);
    let window = prop::option::of(1_usize..300);
    (heads, head_dims, 1_usize..70, window, rows).prop_map(
        |(heads, head_dim, block_size, window, rows)| Batch {
            heads,
            head_dim,
            block_size,
            window,
            rows,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Alone or in any batch, a row gives the same bits, and they are right.
    #[test]
    fn rows_do_not_depend_on_their_batch(batch in batches()) {
        let (heads, kv_heads) = batch.heads;
        let attention = shape(heads, kv_heads, batch.head_dim, batch.block_size);
        let sequences: Vec<Sequence> = (0..batch.rows.len())
            .map(|i| Sequence::new(100 + 10 * i as u64, &attention, 300))
            .collect();
        let setup = Setup { attention, window: batch.window, sequences: &sequences };
        let numbered = batch.rows.iter().enumerate();
        let rows: Vec<Row> = numbered.map(|(i, (context, new))| row(i, *context, *new)).collect();
        at_every_level(|cores| {
            let together = setup.run::<f16>(cores, &rows);
            for (row, together) in rows.iter().zip(together) {
                let alone = setup.run::<f16>(cores, &[*row]).concat();
                assert_eq!(bits(&alone), bits(&together));
                let last = Row { new: 1, ..*row };
                let alone = setup.run::<f16>(cores, &[last]).concat();
                assert_eq!(bits(&alone), bits(&together[together.len() - alone.len()..]));
                assert_close(&alone, &setup.oracle::<f16>(last), 1e-5);
            }
        });
    }
}
