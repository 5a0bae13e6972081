//! `plan_attention.cu`: what the kernel plans is what a model of it says, and covers all work just
//! once. Where there is no C++ compiler the model alone is held to that.

use inflight_kernels::ops::plan_attention::{MANY_PIECES, MIN_UNITS, PlanLayout, TILE_LEN};
use proptest::prelude::*;

use crate::{
    attention::{Division, PlannedHeads, Row, plan_rows},
    emulator::Order,
};

#[derive(Clone, Copy, Debug, PartialEq)]
struct DecodeRow {
    row: usize,
    unit: u32,
    tiles: u32,
    first_tile: u32,
}

/// As `PlanLayout` describes it.
#[derive(Debug, PartialEq)]
struct Plan {
    share: u32,
    units: u32,
    rows: Vec<DecodeRow>,
    cta_rows: Vec<Option<usize>>,
    prefill_tiles: Vec<(usize, u32)>,
    longest_prefill: u32,
}

#[derive(Clone, Copy, Debug)]
struct Shape {
    num_ctas: u32,
    head_groups: u32,
    group: u32,
    prefill_tile: u32,
    window: u32,
    one_kernel: bool,
}

/// The kernel's plan, which the model must foresee.
fn plan(rows: &[Row], shape: Shape) -> Plan {
    let expected = model(rows, shape);
    if let Some(found) = emulated(rows, shape) {
        assert_eq!(found, expected, "{rows:?}, {shape:?}");
    }
    expected
}

fn emulated(rows: &[Row], shape: Shape) -> Option<Plan> {
    let num_rows = rows.len() as u32;
    let num_tokens = rows.iter().map(|row| row.queries).sum();
    let Shape { num_ctas, head_groups, group, prefill_tile, window, one_kernel } = shape;
    let layout = PlanLayout {
        max_rows: num_rows + 3,
        num_ctas,
        max_prefill_tiles: PlanLayout::prefill_tiles(num_tokens, num_rows, group, prefill_tile),
        max_prefixes: 0,
    };
    let heads = PlannedHeads { head_groups, group, window };
    let division = Division { layout, prefill_tile, one_kernel };
    let words = plan_rows(rows, heads, division, Order::Shuffled(num_rows))?;
    let (header, rest) = words.as_slice().split_at(8);
    let (decode_rows, rest) = rest.split_at(4 * layout.max_rows as usize);
    let (cta_rows, prefill_tiles) = rest.split_at(num_ctas.next_multiple_of(2) as usize);
    let index = |word: u32| (word != u32::MAX).then_some(word as usize);
    let decode_row = |words: &[u32]| DecodeRow {
        row: words[0] as usize,
        unit: words[1],
        tiles: words[2],
        first_tile: words[3],
    };
    Some(Plan {
        share: header[0],
        units: header[1],
        rows: decode_rows.chunks(4).take(header[2] as usize).map(decode_row).collect(),
        cta_rows: cta_rows[..num_ctas as usize].iter().map(|word| index(*word)).collect(),
        prefill_tiles: prefill_tiles
            .chunks(2)
            .take(header[3] as usize)
            .map(|words| (words[0] as usize, words[1]))
            .collect(),
        longest_prefill: header[4],
    })
}

/// The same by other means: rows one after the other.
fn model(rows: &[Row], shape: Shape) -> Plan {
    let mut plan = Plan {
        share: 0,
        units: 0,
        rows: vec![],
        cta_rows: vec![],
        prefill_tiles: vec![],
        longest_prefill: 0,
    };
    for (row, Row { context, queries }) in rows.iter().copied().enumerate() {
        if queries == 1 && context > 0 && !shape.one_kernel {
            let first_tile =
                if context > shape.window { (context - shape.window) / TILE_LEN } else { 0 };
            let tiles = context.div_ceil(TILE_LEN) - first_tile;
            plan.rows.push(DecodeRow { row, unit: plan.units, tiles, first_tile });
            plan.units += tiles * shape.head_groups;
        } else if context > 0 {
            plan.longest_prefill = plan.longest_prefill.max(context);
            let tiles = (queries * shape.group).div_ceil(shape.prefill_tile);
            let firsts = (0..tiles).rev().map(|tile| (row, tile * shape.prefill_tile));
            plan.prefill_tiles.extend(firsts);
        }
    }
    let tiles = || plan.rows.iter().map(|row| row.tiles);
    let many = tiles().max().unwrap_or(0) > MANY_PIECES * MIN_UNITS;
    let least = if many { 2 * MIN_UNITS } else { MIN_UNITS };
    plan.share = plan.units.div_ceil(shape.num_ctas).max(least);
    if let (Some(most), Some(least)) = (tiles().max(), tiles().min())
        && most == least
    {
        let whole = plan.share.next_multiple_of(most);
        if whole * 15 <= plan.share * 16 {
            plan.share = whole;
        }
    }
    let pieces = |row: &DecodeRow| row.tiles.div_ceil(plan.share) * shape.head_groups;
    if plan.rows.iter().map(pieces).sum::<u32>() <= shape.num_ctas && plan.rows.len() <= 1024 {
        plan.units = 0;
        for row in &mut plan.rows {
            row.unit = plan.units;
            row.tiles = row.tiles.next_multiple_of(plan.share);
            plan.units += row.tiles * shape.head_groups;
        }
    }
    for cta in 0..shape.num_ctas {
        let unit = cta * plan.share;
        let row = plan.rows.partition_point(|row| row.unit <= unit);
        plan.cta_rows.push((unit < plan.units).then(|| row - 1));
    }
    plan
}

#[derive(Debug)]
struct Piece {
    row: usize,
    head_group: u32,
    first: u32,
    count: u32,
    /// Of the partial sums; `None` if the piece is the whole.
    slot: Option<u32>,
    first_cta: u32,
    last_cta: u32,
}

fn pieces(plan: &Plan, cta: u32, head_groups: u32) -> Vec<Piece> {
    let mut unit = cta * plan.share;
    let end = (unit + plan.share).min(plan.units);
    let mut index = plan.cta_rows[cta as usize].unwrap_or(usize::MAX);
    let mut pieces = Vec::new();
    while unit < end {
        let row = &plan.rows[index];
        let offset = unit - row.unit;
        let (head_group, first) = (offset / row.tiles, offset % row.tiles);
        let count = (row.tiles - first).min(end - unit);
        let start = unit - first;
        let (first_cta, last_cta) = (start / plan.share, (start + row.tiles - 1) / plan.share);
        let slot = (count != row.tiles).then_some(2 * cta + u32::from(cta == first_cta));
        pieces.push(Piece { row: row.row, head_group, first, count, slot, first_cta, last_cta });
        unit += count;
        if unit - row.unit == row.tiles * head_groups {
            index += 1;
        }
    }
    pieces
}

fn check(rows: &[Row], shape: Shape) {
    let plan = plan(rows, shape);
    let mut slots = std::collections::HashSet::new();
    let mut arrivals = std::collections::HashMap::new();
    // For every row and head group, the tiles that its pieces cover, in order of blocks.
    let mut covered = std::collections::HashMap::new();
    let mut most = 0;
    for cta in 0..shape.num_ctas {
        let pieces = pieces(&plan, cta, shape.head_groups);
        most = most.max(pieces.iter().map(|piece| piece.count).sum::<u32>());
        for piece in pieces {
            let key = (piece.row, piece.head_group);
            let next = covered.entry(key).or_insert(0);
            assert_eq!(piece.first, *next, "a hole or an overlap before {piece:?}");
            *next += piece.count;
            assert!((piece.first_cta..=piece.last_cta).contains(&cta), "{piece:?}");
            if let Some(slot) = piece.slot {
                assert!(slot < 2 * shape.num_ctas && slots.insert(slot), "slot of {piece:?}");
                *arrivals.entry((key, piece.last_cta - piece.first_cta + 1)).or_insert(0) += 1;
            }
        }
    }
    for row in &plan.rows {
        for head_group in 0..shape.head_groups {
            assert_eq!(covered.remove(&(row.row, head_group)), Some(row.tiles));
            let Row { context, .. } = rows[row.row];
            let real = context.div_ceil(TILE_LEN) - row.first_tile;
            assert!((real..real + plan.share).contains(&row.tiles), "{row:?} of {real} tiles");
        }
    }
    assert!(covered.is_empty());
    for ((key, expected), found) in arrivals {
        assert_eq!(found, expected, "arrivals at {key:?}");
    }
    assert!(most <= plan.share && plan.share * shape.num_ctas >= plan.units);
    let ideal = plan.units.div_ceil(shape.num_ctas);
    let allowed = ideal.max(2 * MIN_UNITS) * 16 / 15;
    assert!(most <= allowed, "{most} units in one block, {ideal} would do");
}

/// What is not a decode row is cut into tiles of query rows.
fn check_prefill(rows: &[Row], shape: Shape) {
    let plan = plan(rows, shape);
    let num_tokens = rows.iter().map(|row| row.queries).sum();
    let bound =
        PlanLayout::prefill_tiles(num_tokens, rows.len() as u32, shape.group, shape.prefill_tile);
    assert!(plan.prefill_tiles.len() <= bound as usize, "{} tiles", plan.prefill_tiles.len());
    let least = if shape.one_kernel { 1 } else { 2 };
    for (row, Row { context, queries }) in rows.iter().copied().enumerate() {
        if context == 0 || queries < least {
            assert!(plan.prefill_tiles.iter().all(|tile| tile.0 != row), "row {row}");
            continue;
        }
        let mut firsts: Vec<u32> =
            plan.prefill_tiles.iter().filter(|tile| tile.0 == row).map(|tile| tile.1).collect();
        firsts.reverse();
        let expected = (0..queries * shape.group).step_by(shape.prefill_tile as usize);
        assert!(firsts.into_iter().eq(expected));
    }
}

fn rows() -> impl Strategy<Value = Vec<Row>> {
    let decode = prop_oneof![Just(0), 1_u32..200, 1_u32..20_000]
        .prop_map(|context| Row { context, queries: 1 });
    let prefill = (2_u32..600, 0_u32..3000)
        .prop_map(|(queries, before)| Row { context: before + queries, queries });
    let padding = Just(Row { context: 0, queries: 0 });
    prop::collection::vec(prop_oneof![6 => decode, 2 => prefill, 1 => padding], 0..80)
}

fn shapes() -> impl Strategy<Value = Shape> {
    let window = prop_oneof![Just(u32::MAX), 1_u32..5000];
    let tile = prop::sample::select(vec![64, 128]);
    let one_kernel = prop::bool::weighted(0.2);
    (1_u32..300, 1_u32..20, 1_u32..9, tile, window, one_kernel).prop_map(
        |(num_ctas, head_groups, group, prefill_tile, window, one_kernel)| Shape {
            num_ctas,
            head_groups,
            group,
            prefill_tile,
            window,
            one_kernel,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn all_work_is_done_once_and_evenly(rows in rows(), shape in shapes()) {
        check(&rows, shape);
        check_prefill(&rows, shape);
    }
}

const REFERENCE: Shape = Shape {
    num_ctas: 264,
    head_groups: 8,
    group: 4,
    prefill_tile: 128,
    window: u32::MAX,
    one_kernel: false,
};

#[test]
fn the_shapes_of_the_reference_experiment() {
    let shape = REFERENCE;
    let rows = vec![Row { context: 4096, queries: 1 }; 32];
    check(&rows, shape);
    let even = plan(&rows, shape);
    // 62.06 units would do; with 64 no row is split.
    assert_eq!((even.units, even.share), (32 * 8 * 64, 64));
    assert!((0..264).flat_map(|cta| pieces(&even, cta, 8)).all(|piece| piece.slot.is_none()));
    // Alone, a row is still spread over half of the GPU's blocks, four tiles each; a short one over
    // more pieces of two.
    let short = plan(&[Row { context: 640, queries: 1 }], shape);
    assert_eq!((short.units, short.share), (80, 2));
    let alone = plan(&rows[..1], shape);
    assert_eq!((alone.units, alone.share), (512, 4));
    // With 11 tiles every eleventh block would have pieces of two heads; they get a block each.
    let odd = plan(&[Row { context: 704, queries: 1 }], shape);
    assert_eq!((odd.units, odd.share, odd.rows[0].tiles), (96, 2, 12));
    assert!((0..264).all(|cta| pieces(&odd, cta, 8).len() <= 1));
    check(&rows[..1], shape);
    check(&[], shape);
    check(&[Row { context: 1, queries: 1 }], shape);
}

#[test]
fn windows_leave_out_what_nobody_sees() {
    let shape = Shape { num_ctas: 1, head_groups: 1, group: 1, window: 100, ..REFERENCE };
    let tiles = |context| {
        let plan = plan(&[Row { context, queries: 1 }], shape);
        (plan.rows[0].first_tile, plan.rows[0].tiles)
    };
    // Positions 28 to 127, 29 to 128, 156 to 255, 157 to 256.
    assert_eq!([128, 129, 256, 257].map(tiles), [(0, 2), (0, 3), (2, 2), (2, 3)]);
}

/// The kernel takes a thousand rows at a time.
#[test]
fn more_rows_than_threads() {
    let row = |i: u32| match i % 7 {
        0 => Row { context: 0, queries: 1 },
        1 => Row { context: 100 + i, queries: 3 + i % 50 },
        _ => Row { context: 1 + i * 37 % 900, queries: 1 },
    };
    let rows: Vec<Row> = (0..2500).map(row).collect();
    check(&rows, REFERENCE);
    check_prefill(&rows, REFERENCE);
    check_prefill(&rows, Shape { one_kernel: true, ..REFERENCE });
}

#[test]
fn plans_have_room_for_everything() {
    let layout = PlanLayout { max_rows: 3, num_ctas: 5, max_prefill_tiles: 7, max_prefixes: 0 };
    assert_eq!(layout.num_words(), 8 + 12 + 6 + 14);
    assert_eq!(PlanLayout::prefill_tiles(1000, 2, 3, 128), 23 + 2);
    assert_eq!(PlanLayout::prefill_tiles(2, 9, 1, 64), 2);
}
