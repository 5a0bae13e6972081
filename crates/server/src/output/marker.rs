//! Markers in a text that comes in pieces.

/// Where the first marker begins in `text`, and which of them it is. Of those that begin at one
/// place the first in the list counts.
pub(crate) fn find<'m>(text: &str, markers: &[&'m str]) -> Option<(usize, &'m str)> {
    let found = markers.iter().filter_map(|marker| Some((text.find(marker)?, *marker)));
    found.min_by_key(|(at, _)| *at)
}

/// How many bytes at the end of `text` may be the start of a marker: its longest suffix that is a
/// proper prefix of one.
pub(crate) fn num_held(text: &str, markers: &[&str]) -> usize {
    let longest = markers.iter().map(|marker| marker.len()).max().unwrap_or(0);
    let may_begin = |held: usize| {
        let start = text.len() - held;
        text.is_char_boundary(start)
            && markers.iter().any(|m| held < m.len() && m.starts_with(&text[start..]))
    };
    (1..longest.min(text.len() + 1)).rev().find(|held| may_begin(*held)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markers_are_found_and_awaited() {
        assert_eq!(find("a<b><c>", &["<c>", "<b>"]), Some((1, "<b>")));
        assert_eq!(find("a<b", &["<b>"]), None);
        assert_eq!(num_held("a<b", &["<b>"]), 2);
        assert_eq!(num_held("a<<", &["<<b>"]), 2);
        assert_eq!(num_held("<b>", &["<b>"]), 0, "that is the marker itself");
        assert_eq!(num_held("é", &["<b>"]), 0);
        assert_eq!(num_held("", &["<b>"]), 0);
    }
}
