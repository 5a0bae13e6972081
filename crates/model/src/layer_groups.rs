//! Groups of layers that look equally far back: each has block tables of its own.

use inflight_backend::MAX_LAYER_GROUPS;

use crate::ModelConfig;

/// How a model's layers share the blocks of the KV cache.
///
/// A block holds keys and values of one group's layers, `width` of them; layers of different groups
/// take different blocks of the same memory:
///
/// ```text
///   layers          l l l l l g l l l l l g       l: a window, g: everything
///   groups          1 1 2 2 3 0 3 4 4 5 5 0       width 2
///   place in group  0 1 0 1 0 0 1 0 1 0 1 1
/// ```
///
/// The width is the one by which a sequence that fills the model's context takes the fewest bytes.
/// What a group lacks to the width is lost, so a model whose windows are as wide as its context has
/// one group.
///
/// # Source
/// vLLM's `vllm/v1/core/kv_cache_utils.py` (`_get_kv_cache_groups_uniform_page_size`): groups of
/// equally many layers, so that all blocks have the same bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerGroups {
    /// Of each group how far back its layers look, itself included; `None`: on everything. The
    /// first group looks back the furthest.
    windows: Vec<Option<usize>>,
    width: usize,
    layers: Vec<LayerPlace>,
}

/// Where a layer's keys and values are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerPlace {
    /// Whose block tables hold for it; groups count from 0.
    pub group: usize,
    /// Which of a block's layers it is.
    pub index: usize,
}

/// Rows have so many tokens in the sum by which the width is chosen.
const USUAL_ROW: usize = 512;

impl LayerGroups {
    /// The groups of a model.
    pub fn new(config: &ModelConfig) -> Self {
        Self::of_windows(&config.layer_windows, config.max_position)
    }

    /// The groups of layers that look back so far, in a model of a context of `context` tokens.
    fn of_windows(windows: &[Option<usize>], context: usize) -> Self {
        let reach = |window: Option<usize>| window.unwrap_or(usize::MAX);
        let mut kinds: Vec<Option<usize>> = windows.to_vec();
        kinds.sort_by_key(|window| std::cmp::Reverse(reach(*window)));
        kinds.dedup();
        let num_of = |kind| windows.iter().filter(|window| **window == kind).count();
        let counts: Vec<(Option<usize>, usize)> =
            kinds.into_iter().map(|kind| (kind, num_of(kind))).collect();
        let num_groups =
            |width: usize| counts.iter().map(|(_, num)| num.div_ceil(width)).sum::<usize>();
        let kept = |kind: Option<usize>| context.min(reach(kind).saturating_add(USUAL_ROW));
        let cost = |width: usize| {
            let of = |(kind, num): &(_, usize)| num.div_ceil(width) * width * kept(*kind);
            counts.iter().map(of).sum::<usize>()
        };
        let most = counts.iter().map(|(_, num)| *num).max().unwrap_or(0);
        let widths = (1..=most).filter(|width| num_groups(*width) <= MAX_LAYER_GROUPS);
        // Of equal ones the widest: it has the fewest tables.
        let best = widths.min_by_key(|width| (cost(*width), std::cmp::Reverse(*width)));
        let widest = counts.first().and_then(|(kind, _)| *kind);
        let alike = windows.len() * kept(widest);
        match best.filter(|width| cost(*width) < alike) {
            Some(width) => Self::of_width(windows, &counts, width),
            None => Self::single(windows.len(), widest),
        }
    }

    /// One group of all layers, that keeps what the one sees that looks back the furthest.
    fn single(num_layers: usize, window: Option<usize>) -> Self {
        let layers = (0..num_layers).map(|index| LayerPlace { group: 0, index }).collect();
        Self { windows: vec![window], width: num_layers, layers }
    }

    fn of_width(
        windows: &[Option<usize>],
        counts: &[(Option<usize>, usize)],
        width: usize,
    ) -> Self {
        let mut groups = Vec::new();
        let mut layers = vec![LayerPlace { group: 0, index: 0 }; windows.len()];
        for (kind, _) in counts {
            let of_kind = layers.iter_mut().zip(windows).filter(|(_, window)| *window == kind);
            for (number, (place, _)) in of_kind.enumerate() {
                if number % width == 0 {
                    groups.push(*kind);
                }
                *place = LayerPlace { group: groups.len() - 1, index: number % width };
            }
        }
        Self { windows: groups, width, layers }
    }

    /// Of each group how far back its layers look, itself included; `None`: on everything. The
    /// first group looks back the furthest.
    pub fn windows(&self) -> &[Option<usize>] {
        &self.windows
    }

    /// The same of the groups behind the first.
    pub fn other_windows(&self) -> &[Option<usize>] {
        self.windows.get(1..).unwrap_or_default()
    }

    /// Number of groups.
    pub fn num_groups(&self) -> usize {
        self.windows.len()
    }

    /// Layers whose keys and values a block holds.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Where each layer's keys and values are.
    pub fn layers(&self) -> &[LayerPlace] {
        &self.layers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Number of groups, width, and the first group's layers of a model in which every `period`th
    /// layer sees everything.
    fn periodic(num_layers: usize, period: usize, window: usize, context: usize) -> LayerGroups {
        let windows: Vec<_> =
            (1..=num_layers).map(|layer| (layer % period != 0).then_some(window)).collect();
        LayerGroups::of_windows(&windows, context)
    }

    #[test]
    fn layers_alike_are_one_group() {
        for windows in [vec![None; 5], vec![Some(64); 5]] {
            let groups = LayerGroups::of_windows(&windows, 4096);
            assert_eq!((groups.windows(), groups.width()), (&windows[..1], 5));
            assert_eq!(groups.layers()[3], LayerPlace { group: 0, index: 3 });
        }
        // Nothing ever goes: tables of their own would only cost.
        let groups = LayerGroups::of_windows(&[Some(4096), None], 4096);
        assert_eq!((groups.windows(), groups.width()), (&[None][..], 2));
    }

    #[test]
    fn gemma_3_has_groups_of_as_many_layers_as_see_everything() {
        // 1B: 26 layers, every sixth sees all 32k tokens, the others 512.
        let groups = periodic(26, 6, 512, 32_768);
        assert_eq!((groups.num_groups(), groups.width()), (7, 4));
        assert_eq!(groups.windows(), [&[None][..], &[Some(512); 6]].concat());
        // 27B: 62 layers, 128k tokens, a window of 1024.
        let groups = periodic(62, 6, 1024, 131_072);
        assert_eq!((groups.num_groups(), groups.width()), (7, 10));
    }

    #[test]
    fn every_layer_has_a_place_of_its_own() {
        for (num_layers, period) in [(26, 6), (34, 6), (48, 6), (62, 6), (28, 4), (7, 2), (13, 13)]
        {
            let groups = periodic(num_layers, period, 512, 32_768);
            let mut places: Vec<_> =
                groups.layers().iter().map(|place| (place.group, place.index)).collect();
            places.sort_unstable();
            places.dedup();
            assert_eq!(places.len(), num_layers);
            let (group, index) = places.into_iter().max_by_key(|place| place.1).unwrap();
            assert!(group < groups.num_groups() && index < groups.width());
            assert!(groups.num_groups() <= MAX_LAYER_GROUPS);
            for (layer, place) in groups.layers().iter().enumerate() {
                let window = ((layer + 1) % period != 0).then_some(512);
                assert_eq!(groups.windows()[place.group], window);
            }
        }
    }

    #[test]
    fn windows_of_more_kinds_than_there_are_groups_share_one() {
        let windows: Vec<_> = (1..20).map(|i| Some(i * 10)).collect();
        assert_eq!(LayerGroups::of_windows(&windows, 9999).windows(), [Some(190)]);
    }
}
