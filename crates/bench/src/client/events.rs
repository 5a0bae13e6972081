//! Server-sent events out of bytes that come in any pieces.

/// Longest event: a server that never ends one is not to fill our memory.
const MAX_EVENT_BYTES: usize = 16 << 20;

/// Puts events together.
///
/// # Source
/// HTML Living Standard, section 9.2.6, "Interpreting an event stream"; only `data` is kept.
#[derive(Debug, Default)]
pub(crate) struct EventReader {
    /// A line without its end.
    line: Vec<u8>,
    /// The event's data so far; `None`: no such line yet.
    data: Option<Vec<u8>>,
    /// A line has just ended in `\r`: a `\n` that follows belongs to it.
    ended_in_cr: bool,
    is_too_long: bool,
}

impl EventReader {
    /// Takes `bytes`; `show` gets the data of each event that they complete.
    pub(crate) fn push(&mut self, bytes: &[u8], mut show: impl FnMut(&[u8])) {
        let mut rest = bytes;
        while let Some(at) = rest.iter().position(|byte| matches!(byte, b'\n' | b'\r')) {
            let (line, end) = (&rest[..at], rest[at]);
            let completes_crlf = self.ended_in_cr && end == b'\n' && line.is_empty();
            self.ended_in_cr = end == b'\r';
            rest = &rest[at + 1..];
            if completes_crlf && self.line.is_empty() {
                continue;
            }
            self.line.extend_from_slice(line);
            self.end_line(&mut show);
        }
        if !rest.is_empty() {
            self.ended_in_cr = false;
        }
        self.line.extend_from_slice(rest);
        let held = self.line.len() + self.data.as_ref().map_or(0, Vec::len);
        if held > MAX_EVENT_BYTES {
            (self.is_too_long, self.line, self.data) = (true, Vec::new(), None);
        }
    }

    /// Whether an event has begun and not ended, or was too long to keep.
    pub(crate) fn is_torn(&self) -> bool {
        self.is_too_long || !self.line.is_empty() || self.data.is_some()
    }

    fn end_line(&mut self, show: &mut impl FnMut(&[u8])) {
        if self.line.is_empty() {
            if let Some(data) = self.data.take() {
                show(&data);
            }
            return;
        }
        if let Some(value) = self.line.strip_prefix(b"data:") {
            let value = value.strip_prefix(b" ").unwrap_or(value);
            match &mut self.data {
                Some(data) => {
                    data.push(b'\n');
                    data.extend_from_slice(value);
                }
                None => self.data = Some(value.to_vec()),
            }
        }
        self.line.clear();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(pieces: &[&[u8]]) -> (Vec<String>, bool) {
        let mut reader = EventReader::default();
        let mut events = Vec::new();
        for piece in pieces {
            reader.push(piece, |data| {
                events.push(String::from_utf8(data.to_vec()).unwrap());
            });
        }
        (events, reader.is_torn())
    }

    #[test]
    fn events_are_as_the_standard_has_them() {
        let check = |text: &str, events: &[&str], is_torn| {
            let (read, torn) = read(&[text.as_bytes()]);
            assert_eq!((read, torn), (events.iter().map(|e| e.to_string()).collect(), is_torn));
        };
        check("data: a\n\ndata:b\n\n", &["a", "b"], false);
        check("data: a\r\n\r\ndata: b\r\n\r\n", &["a", "b"], false);
        check(": comment\n\nevent: x\ndata: 1\ndata: 2\nid: 7\n\n", &["1\n2"], false);
        check("data: a\n\ndata: half", &["a"], true);
        check("data:\n\n", &[""], false);
    }

    proptest! {
        #[test]
        fn pieces_do_not_matter(cuts in prop::collection::vec(0_usize..60, 0..8), crlf: bool) {
            let text = "data: é1\n\ndata: 2\ndata: 3\n\n: c\n\ndata: [DONE]\n\n";
            let text = if crlf { text.replace('\n', "\r\n") } else { text.to_owned() };
            let bytes = text.as_bytes();
            let mut cuts: Vec<_> = cuts.into_iter().map(|cut| cut.min(bytes.len())).collect();
            cuts.extend([0, bytes.len()]);
            cuts.sort_unstable();
            let pieces: Vec<_> = cuts.windows(2).map(|pair| &bytes[pair[0]..pair[1]]).collect();
            let events = vec!["é1".to_owned(), "2\n3".to_owned(), "[DONE]".to_owned()];
            prop_assert_eq!(read(&pieces), (events, false));
        }
    }
}
