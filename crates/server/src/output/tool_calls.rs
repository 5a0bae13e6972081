//! Tool calls in a text, told as they come.

use std::sync::Arc;

use super::call_scanner::{CallScanner, Progress};
use super::{Piece, marker};

/// How a model writes tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolFormat {
    /// `<tool_call>{"name": ..., "arguments": ...}</tool_call>`, as Hermes and Qwen write it; with
    /// a list in the tags, as SmolLM2 does.
    Hermes,
    /// `{"name": ..., "parameters": ...}` alone, several joined by `;`, as Llama 3 writes it; it
    /// may begin with `<|python_tag|>`.
    Llama3,
    /// `[TOOL_CALLS]` and a list of calls, or of names each followed by arguments, as Mistral's
    /// older and newer models write it.
    Mistral,
}

impl ToolFormat {
    /// What begins calls.
    fn opening(self) -> &'static str {
        match self {
            Self::Hermes => "<tool_call>",
            Self::Llama3 => "<|python_tag|>",
            Self::Mistral => "[TOOL_CALLS]",
        }
    }

    /// What ends them; `None`: nothing but the text's end.
    fn closing(self) -> Option<&'static str> {
        (self == Self::Hermes).then_some("</tool_call>")
    }

    /// All marks that this format writes. Some are control tokens.
    pub(crate) fn marks(self) -> &'static [&'static str] {
        match self {
            Self::Hermes => &["<tool_call>", "</tool_call>"],
            Self::Llama3 => &["<|python_tag|>"],
            Self::Mistral => &["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"],
        }
    }

    /// The format of which a chat template knows the marks; `None`: it knows none.
    pub(crate) fn of_template(mentions: impl Fn(&str) -> bool) -> Option<Self> {
        if mentions("[TOOL_CALLS]") {
            Some(Self::Mistral)
        } else if mentions("<tool_call>") {
            Some(Self::Hermes)
        } else if mentions("<|python_tag|>") || mentions("<|start_header_id|>") {
            Some(Self::Llama3)
        } else {
            None
        }
    }
}

/// What calls are looked for.
#[derive(Clone, Debug)]
pub(crate) struct ToolCallOptions {
    pub(crate) format: ToolFormat,
    /// Names of the tools.
    pub(crate) names: Arc<[String]>,
    /// Whether calls after the first are left out.
    pub(crate) only_one: bool,
}

/// Finds calls in a text that comes in pieces.
///
/// What looks like a call and is none is text. What was told as a call and turns out to be no JSON
/// stays its arguments, as the model wrote them.
#[derive(Debug)]
pub(crate) struct ToolCallParser {
    options: ToolCallOptions,
    state: State,
    num_calls: usize,
    /// Not read yet: the start of a mark, or white space that calls may follow.
    held: String,
}

#[derive(Debug, Default)]
enum State {
    /// Nothing but white space has come.
    #[default]
    Start,
    Text,
    /// After a closing mark: white space between calls, and after the last, is part of their form.
    Gap,
    /// Between an opening mark and calls, between calls, and after them.
    Calls(Calls),
    Call(Calls, CallScanner),
    /// Mistral's newer form: a name, up to its arguments.
    Name(Calls, String),
    /// Arguments that are no JSON, up to the closing mark.
    Raw,
}

/// Where calls stand.
#[derive(Debug, Default)]
struct Calls {
    /// What was read since the last text or call, to be told as text if no call comes of it.
    read: String,
    in_list: bool,
}

impl ToolCallParser {
    pub(crate) fn new(options: ToolCallOptions) -> Self {
        Self { options, state: State::default(), num_calls: 0, held: String::new() }
    }

    /// Takes more text.
    pub(crate) fn push(&mut self, text: &str, pieces: &mut Vec<Piece>) {
        self.held += text;
        let mut found = Vec::new();
        while self.advance(&mut found) {
            self.tell(&mut found, pieces);
        }
        self.tell(&mut found, pieces);
    }

    /// Ends the text: what was held back is text.
    pub(crate) fn finish(&mut self, pieces: &mut Vec<Piece>) {
        let mut found = Vec::new();
        let held = std::mem::take(&mut self.held);
        match std::mem::take(&mut self.state) {
            State::Raw => Piece::Arguments(held).join(&mut found),
            State::Call(_, scanner) if scanner.is_announced() => {}
            State::Gap => {}
            State::Start | State::Text => self.rest(held, &mut found),
            State::Calls(calls) | State::Call(calls, _) | State::Name(calls, _) => {
                self.rest(calls.read + &held, &mut found);
            }
        }
        self.tell(&mut found, pieces);
    }

    /// Tells `read` as text, unless it is what stands around calls that were told.
    fn rest(&self, read: String, found: &mut Vec<Piece>) {
        let is_frame = read.chars().all(|c| c.is_whitespace() || "[],;".contains(c));
        if !(is_frame && self.num_calls > 0) {
            Piece::Text(read).join(found);
        }
    }

    /// Hands on what was found, without surplus calls.
    fn tell(&mut self, found: &mut Vec<Piece>, pieces: &mut Vec<Piece>) {
        for piece in found.drain(..) {
            self.num_calls += usize::from(matches!(piece, Piece::Call { .. }));
            let is_call = matches!(piece, Piece::Call { .. } | Piece::Arguments(_));
            if !(is_call && self.options.only_one && self.num_calls > 1) {
                piece.join(pieces);
            }
        }
    }

    /// Reads on; false when more text is needed.
    fn advance(&mut self, found: &mut Vec<Piece>) -> bool {
        if self.held.is_empty() {
            return false;
        }
        match std::mem::take(&mut self.state) {
            State::Start => self.start(),
            State::Text => self.text(found),
            State::Gap => self.gap(),
            State::Calls(calls) => self.calls(calls, found),
            State::Call(calls, scanner) => self.call(calls, scanner, found),
            State::Name(calls, name) => self.name(calls, name, found),
            State::Raw => self.raw(found),
        }
    }

    /// Goes to a state that can read on at once.
    fn go(&mut self, state: State) -> bool {
        self.state = state;
        true
    }

    /// Goes to a state that needs more text.
    fn wait(&mut self, state: State) -> bool {
        self.state = state;
        false
    }

    /// Llama's calls may begin without a mark, right at the start.
    fn start(&mut self) -> bool {
        let text = self.held.trim_start();
        if text.is_empty() {
            return self.wait(State::Start);
        }
        let is_bare = self.options.format == ToolFormat::Llama3 && text.starts_with('{');
        self.go(if is_bare { State::Calls(Calls::default()) } else { State::Text })
    }

    fn text(&mut self, found: &mut Vec<Piece>) -> bool {
        let opening = self.options.format.opening();
        if let Some((at, mark)) = marker::find(&self.held, &[opening]) {
            // White space before calls is part of their form.
            Piece::Text(self.held[..at].trim_end().to_owned()).join(found);
            self.held.drain(..at + mark.len());
            return self.go(State::Calls(Calls { read: mark.to_owned(), in_list: false }));
        }
        let unsure = self.held.len() - marker::num_held(&self.held, &[opening]);
        let sure = self.held[..unsure].trim_end().len();
        Piece::Text(self.held.drain(..sure).collect()).join(found);
        self.wait(State::Text)
    }

    fn gap(&mut self) -> bool {
        self.held = self.held.trim_start().to_owned();
        if self.held.is_empty() { self.wait(State::Gap) } else { self.go(State::Text) }
    }

    fn calls(&mut self, mut calls: Calls, found: &mut Vec<Piece>) -> bool {
        let (opening, closing) = (self.options.format.opening(), self.options.format.closing());
        let text = self.held.trim_start();
        if let Some(rest) = closing.and_then(|closing| text.strip_prefix(closing)) {
            self.held = rest.to_owned();
            return self.go(State::Gap);
        }
        if let Some(rest) = text.strip_prefix(opening) {
            self.held = rest.to_owned();
            return self.go(State::Calls(Calls { read: calls.read + opening, in_list: false }));
        }
        if opening.starts_with(text) || closing.is_some_and(|closing| closing.starts_with(text)) {
            return self.wait(State::Calls(calls));
        }
        let c = self.held.chars().next().expect("white space alone starts every mark");
        match c {
            '{' => return self.go(State::Call(calls, CallScanner::default())),
            '[' | ']' if calls.in_list == (c == ']') => calls.in_list = c == '[',
            ',' | ';' => {}
            c if c.is_whitespace() => {}
            _ if self.options.format == ToolFormat::Mistral && !calls.in_list => {
                return self.go(State::Name(calls, String::new()));
            }
            _ => return self.give_up(calls, found),
        }
        self.take(c, &mut calls.read);
        self.go(State::Calls(calls))
    }

    /// No call: what was read is text.
    fn give_up(&mut self, calls: Calls, found: &mut Vec<Piece>) -> bool {
        self.rest(calls.read, found);
        self.go(State::Text)
    }

    fn call(&mut self, mut calls: Calls, mut scanner: CallScanner, found: &mut Vec<Piece>) -> bool {
        let names = Arc::clone(&self.options.names);
        // An object without a mark may be an answer just as well.
        let is_bare = self.options.format == ToolFormat::Llama3;
        let is_tool = move |name: &str| !is_bare || names.iter().any(|known| known == name);
        while let Some(c) = self.held.chars().next() {
            match scanner.feed(c, &is_tool, found) {
                Progress::Inside => self.take(c, &mut calls.read),
                Progress::Done => {
                    self.held.drain(..c.len_utf8());
                    calls.read.clear();
                    return self.go(State::Calls(calls));
                }
                Progress::Malformed if scanner.is_announced() => return self.go(State::Raw),
                Progress::Malformed => return self.give_up(calls, found),
            }
        }
        self.wait(State::Call(calls, scanner))
    }

    fn name(&mut self, mut calls: Calls, mut name: String, found: &mut Vec<Piece>) -> bool {
        while let Some(c) = self.held.chars().next() {
            if c == '{' {
                let ends = ["[ARGS]", "[CALL_ID]"].map(|mark| name.find(mark));
                name.truncate(ends.into_iter().flatten().min().unwrap_or(name.len()));
                let scanner = CallScanner::of_arguments(name, found);
                return self.go(State::Call(calls, scanner));
            }
            if c.is_whitespace() {
                return self.give_up(calls, found);
            }
            self.take(c, &mut calls.read);
            name.push(c);
        }
        self.wait(State::Name(calls, name))
    }

    fn raw(&mut self, found: &mut Vec<Piece>) -> bool {
        let closing = self.options.format.closing();
        if let Some((at, _)) = marker::find(&self.held, closing.as_slice()) {
            Piece::Arguments(self.held.drain(..at).collect()).join(found);
            return self.go(State::Calls(Calls::default()));
        }
        let sure = self.held.len() - marker::num_held(&self.held, closing.as_slice());
        Piece::Arguments(self.held.drain(..sure).collect()).join(found);
        self.wait(State::Raw)
    }

    fn take(&mut self, c: char, read: &mut String) {
        self.held.drain(..c.len_utf8());
        read.push(c);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(format: ToolFormat, only_one: bool, text: &str, piece_len: usize) -> Vec<Piece> {
        let names = ["f", "g"].map(str::to_owned).into();
        let mut parser = ToolCallParser::new(ToolCallOptions { format, names, only_one });
        let mut pieces = Vec::new();
        let chars: Vec<char> = text.chars().collect();
        for piece in chars.chunks(piece_len) {
            parser.push(&piece.iter().collect::<String>(), &mut pieces);
        }
        parser.finish(&mut pieces);
        pieces
    }

    /// `t:` text, `f` a call of that name, `a:` arguments.
    fn check(format: ToolFormat, text: &str, expected: &[&str]) {
        let expected: Vec<_> = expected
            .iter()
            .map(|piece| match piece.split_once(':') {
                Some(("t", text)) => Piece::Text(text.to_owned()),
                Some(("a", text)) => Piece::Arguments(text.to_owned()),
                _ => Piece::Call { name: (*piece).to_owned() },
            })
            .collect();
        for len in [1, 2, 3, 5, 1000] {
            assert_eq!(parse(format, false, text, len), expected, "{text:?} by {len}");
        }
    }

    #[test]
    fn hermes_and_qwen() {
        let check = |text: &str, expected: &[&str]| check(ToolFormat::Hermes, text, expected);
        check("Just text.\n", &["t:Just text.\n"]);
        check(
            "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": \"é}\"}}\n</tool_call>",
            &["f", "a:{\"x\": \"é}\"}"],
        );
        check(
            "Let me see.\n<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>\n\
             <tool_call>{\"name\": \"other\", \"arguments\": {\"a\":1}}</tool_call>\n",
            &["t:Let me see.", "f", "a:{}", "other", "a:{\"a\":1}"],
        );
        check("<tool_call>{\"name\": \"f\", \"argum", &["f"]);
        check("<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": [1, ", &["f", "a:{\"a\": [1, "]);
        check("<tool_call>oh\n</tool_call>", &["t:<tool_call>oh\n</tool_call>"]);
        check("<tool_call>\n{\"na", &["t:<tool_call>\n{\"na"]);
        check("a < b <tool", &["t:a < b <tool"]);
        check(
            "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": hi}}</tool_call>after",
            &["f", "a:{\"a\": hi}}", "t:after"],
        );
    }

    #[test]
    fn lists_of_calls_as_smollm_writes_them() {
        check(
            ToolFormat::Hermes,
            "<tool_call>[{\"name\": \"f\", \"arguments\": {\"a\": 1}}, \
             {\"name\": \"g\"}]</tool_call>",
            &["f", "a:{\"a\": 1}", "g", "a:{}"],
        );
        check(ToolFormat::Hermes, "<tool_call>[]</tool_call>", &[]);
    }

    #[test]
    fn llama_3() {
        let check = |text: &str, expected: &[&str]| check(ToolFormat::Llama3, text, expected);
        check("{\"name\": \"f\", \"parameters\": {\"a\": 1}}", &["f", "a:{\"a\": 1}"]);
        check(
            "<|python_tag|>{\"name\": \"f\", \"parameters\": {}}; {\"name\": \"g\", \
             \"parameters\": {}}",
            &["f", "a:{}", "g", "a:{}"],
        );
        check("{\"name\": \"Bob\", \"age\": 3}", &["t:{\"name\": \"Bob\", \"age\": 3}"]);
        check("It is {\"name\": \"f\"}", &["t:It is {\"name\": \"f\"}"]);
        check("{}", &["t:{}"]);
    }

    #[test]
    fn mistral() {
        let check = |text: &str, expected: &[&str]| check(ToolFormat::Mistral, text, expected);
        check(
            "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"a\": 1}}, {\"name\": \"g\", \
             \"arguments\": {}}]",
            &["f", "a:{\"a\": 1}", "g", "a:{}"],
        );
        check("[TOOL_CALLS]f[ARGS]{\"a\": 1}", &["f", "a:{\"a\": 1}"]);
        check(
            "Hm.[TOOL_CALLS]f[CALL_ID]12ab[ARGS]{}[TOOL_CALLS]g{\"b\": 2}",
            &["t:Hm.", "f", "a:{}", "g", "a:{\"b\": 2}"],
        );
        check("[TOOL_CALLS]none at all", &["t:[TOOL_CALLS]none at all"]);
        check("[1, 2]", &["t:[1, 2]"]);
    }

    #[test]
    fn one_call_only() {
        let text = "<tool_call>[{\"name\": \"f\", \"arguments\": {\"a\": 1}}, {\"name\": \"g\"}]";
        let expected =
            [Piece::Call { name: "f".to_owned() }, Piece::Arguments("{\"a\": 1}".to_owned())];
        assert_eq!(parse(ToolFormat::Hermes, true, text, 4), expected);
    }

    const PARTS: &str = concat!(
        r#"([a{}\[\],; "]|<tool_call>|</tool_call>"#,
        r#"|\{"name": "f", "arguments": |\{"a": 1\})*"#
    );

    proptest::proptest! {
        /// However the text is cut, the same is told, and text without marks stays as it is.
        #[test]
        fn cuts_do_not_matter(
            text in PARTS,
            len in 1_usize..8,
            format in proptest::sample::select(
                vec![ToolFormat::Hermes, ToolFormat::Llama3, ToolFormat::Mistral],
            ),
        ) {
            let whole = parse(format, false, &text, usize::MAX);
            proptest::prop_assert_eq!(&parse(format, false, &text, len), &whole);
            if format == ToolFormat::Mistral {
                let unchanged = if text.is_empty() { vec![] } else { vec![Piece::Text(text)] };
                proptest::prop_assert_eq!(whole, unchanged);
            }
        }
    }
}
