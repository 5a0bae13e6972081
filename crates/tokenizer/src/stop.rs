//! Stop strings that may span or start inside tokens.

use crate::TokenizerError;

/// What one push released.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopUpdate {
    /// Text that may now be shown.
    pub text: String,
    /// Which stop string was met, by its place in the list; the text ends there.
    pub stopped_by: Option<usize>,
}

/// Watches a text that arrives in pieces for the first stop string.
///
/// A stop is met when its last byte arrives, so the stop that ends first wins; of those that end
/// at the same byte the longest, which starts first. This does not depend on how the text is cut.
///
/// ```text
/// stop     "\nUser:"
/// pushes   "Hello"    "!\nUs"        "age"          "\nUser: x"
/// released "Hello"    "!"            "\nUsage"      ""  stopped
/// held     ""         "\nUs"         ""             -
/// ```
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stops: Vec<StopString>,
    include_stop: bool,
    /// The longest suffix of the text so far that is a proper prefix of some stop.
    held: String,
    stopped_by: Option<usize>,
}

impl StopMatcher {
    /// Watches for `stops`; the text is cut right before the one that is met.
    ///
    /// # Errors
    /// An empty stop string.
    pub fn new(stops: &[String]) -> Result<Self, TokenizerError> {
        if let Some(index) = stops.iter().position(String::is_empty) {
            return Err(TokenizerError::EmptyStop { index });
        }
        let stops = stops.iter().map(|stop| StopString::new(stop.as_bytes())).collect();
        Ok(Self { stops, include_stop: false, held: String::new(), stopped_by: None })
    }

    /// Sets whether the stop string that is met ends the text instead of being cut off.
    pub fn include_stop(mut self, include: bool) -> Self {
        self.include_stop = include;
        self
    }

    /// Takes the next piece of text and releases what can no longer become a stop.
    ///
    /// After a stop was met every push releases nothing and reports that stop again.
    pub fn push(&mut self, piece: &str) -> StopUpdate {
        if self.stopped_by.is_some() {
            return StopUpdate { text: String::new(), stopped_by: self.stopped_by };
        }
        let scan_start = self.held.len();
        self.held.push_str(piece);
        for at in scan_start..self.held.len() {
            let byte = self.held.as_bytes()[at];
            if let Some(index) = self.advance(byte) {
                return self.stop(index, at + 1);
            }
        }
        let held = self.stops.iter().map(|stop| stop.matched).max().unwrap_or(0);
        let keep = self.held.split_off(self.held.len() - held);
        StopUpdate { text: std::mem::replace(&mut self.held, keep), stopped_by: None }
    }

    /// Ends the text: what was held back is released.
    pub fn finish(&mut self) -> String {
        for stop in &mut self.stops {
            stop.matched = 0;
        }
        std::mem::take(&mut self.held)
    }

    /// Which stop string was met, if any.
    pub fn stopped_by(&self) -> Option<usize> {
        self.stopped_by
    }

    /// Feeds one byte to every stop and returns the longest that it completes.
    fn advance(&mut self, byte: u8) -> Option<usize> {
        let mut met: Option<usize> = None;
        for index in 0..self.stops.len() {
            if self.stops[index].advance(byte) {
                let is_longer = |best: usize| self.stops[index].len() > self.stops[best].len();
                if met.is_none_or(is_longer) {
                    met = Some(index);
                }
            }
        }
        met
    }

    fn stop(&mut self, index: usize, end: usize) -> StopUpdate {
        let cut = if self.include_stop { end } else { end - self.stops[index].len() };
        let mut text = std::mem::take(&mut self.held);
        text.truncate(cut);
        self.stopped_by = Some(index);
        StopUpdate { text, stopped_by: self.stopped_by }
    }
}

/// One stop string as a Knuth-Morris-Pratt automaton.
///
/// # Source
/// Knuth, Morris, Pratt, "Fast pattern matching in strings", 1977.
#[derive(Clone, Debug)]
struct StopString {
    bytes: Vec<u8>,
    /// By length of a prefix, minus one: its longest proper suffix that is also a prefix.
    borders: Vec<usize>,
    /// How many bytes of the stop the text now ends with.
    matched: usize,
}

impl StopString {
    fn new(bytes: &[u8]) -> Self {
        let mut borders = vec![0; bytes.len()];
        let mut border = 0;
        for at in 1..bytes.len() {
            while border > 0 && bytes[at] != bytes[border] {
                border = borders[border - 1];
            }
            border += usize::from(bytes[at] == bytes[border]);
            borders[at] = border;
        }
        Self { bytes: bytes.to_vec(), borders, matched: 0 }
    }

    fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Takes one byte and says whether it completes the stop, after which no byte may follow.
    fn advance(&mut self, byte: u8) -> bool {
        while self.matched > 0 && self.bytes[self.matched] != byte {
            self.matched = self.borders[self.matched - 1];
        }
        self.matched += usize::from(self.bytes[self.matched] == byte);
        self.matched == self.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn matcher(stops: &[&str]) -> StopMatcher {
        let stops: Vec<String> = stops.iter().map(ToString::to_string).collect();
        StopMatcher::new(&stops).unwrap()
    }

    fn update(text: &str, stopped_by: Option<usize>) -> StopUpdate {
        StopUpdate { text: text.to_string(), stopped_by }
    }

    #[test]
    fn a_stop_spanning_pieces_never_leaks() {
        let mut stops = matcher(&["\nUser:"]);
        assert_eq!(stops.push("Hello"), update("Hello", None));
        assert_eq!(stops.push("!\nUs"), update("!", None));
        assert_eq!(stops.push("age"), update("\nUsage", None));
        assert_eq!(stops.push("\nUser: x"), update("", Some(0)));
        assert_eq!(stops.push("more"), update("", Some(0)));
        assert_eq!(stops.finish(), "");
    }

    #[test]
    fn the_stop_that_ends_first_wins_then_the_longest() {
        assert_eq!(matcher(&["abcd", "bc"]).push("xabcd"), update("xa", Some(1)));
        assert_eq!(matcher(&["bc", "abc"]).push("xabc"), update("x", Some(1)));
        assert_eq!(matcher(&["b"]).include_stop(true).push("abc"), update("ab", Some(0)));
    }

    #[test]
    fn what_was_held_comes_out_at_the_end() {
        let mut stops = matcher(&["aab", "é!"]);
        assert_eq!(stops.push("aaa"), update("a", None));
        assert_eq!(stops.push("é"), update("aa", None));
        assert_eq!(stops.finish(), "é");
        assert_eq!(matcher(&[]).push("all"), update("all", None));
    }

    #[test]
    fn an_empty_stop_is_refused() {
        let stops = ["a".to_string(), String::new()];
        let error = StopMatcher::new(&stops).unwrap_err();
        assert!(matches!(error, TokenizerError::EmptyStop { index: 1 }));
    }

    /// The whole text at once: (text shown, stop met).
    fn oracle(stops: &[String], text: &str, include: bool) -> (String, Option<usize>) {
        for end in 0..=text.len() {
            let ending = |stop: &&String| text.as_bytes()[..end].ends_with(stop.as_bytes());
            let longest = stops.iter().filter(ending).map(String::len).max();
            let Some(len) = longest else { continue };
            let met = stops.iter().position(|stop| stop.len() == len && ending(&stop));
            let cut = if include { end } else { end - len };
            return (text[..cut].to_string(), met);
        }
        (text.to_string(), None)
    }

    /// The longest suffix of `text` that is a proper prefix of some stop.
    fn held_oracle<'t>(stops: &[String], text: &'t str) -> &'t str {
        let is_prefix = |suffix: &str| {
            stops.iter().any(|stop| stop.len() > suffix.len() && stop.starts_with(suffix))
        };
        let starts = text.char_indices().map(|(at, _)| at);
        starts.map(|at| &text[at..]).find(|suffix| is_prefix(suffix)).unwrap_or("")
    }

    proptest! {
        #[test]
        fn any_chunking_equals_the_oracle(
            stops in prop::collection::vec("[abé]{1,4}", 0..4),
            pieces in prop::collection::vec("[abcé]{0,4}", 0..12),
            include in any::<bool>(),
        ) {
            let text = pieces.concat();
            let (shown, met) = oracle(&stops, &text, include);
            let mut matcher = StopMatcher::new(&stops).unwrap().include_stop(include);
            let (mut seen, mut fed) = (String::new(), String::new());
            for piece in &pieces {
                let update = matcher.push(piece);
                seen += &update.text;
                fed += piece;
                if update.stopped_by.is_some() {
                    break;
                }
                prop_assert_eq!(&fed[seen.len()..], held_oracle(&stops, &fed));
            }
            seen += &matcher.finish();
            prop_assert_eq!(seen, shown);
            prop_assert_eq!(matcher.stopped_by(), met);
        }
    }
}
