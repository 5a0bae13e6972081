//! Rust source told apart into code and comments, so that a rule never trips over a string.
//!
//! Not a parser: it knows where comments, strings and characters begin and end, and no more. That
//! is enough to find words and to match braces.

/// A source's code and its comments, each as long as the source: the rest is blanked by spaces.
///
/// Lines and byte offsets are those of the source. Quotes stay in `code`, what is in them does not.
#[derive(Debug)]
pub(crate) struct Masked {
    pub(crate) code: String,
    pub(crate) comments: String,
}

impl Masked {
    pub(crate) fn new(source: &str) -> Self {
        let mut scanner = Scanner { rest: source, masked: Masked::empty(source.len()) };
        while let Some(next) = scanner.rest.chars().next() {
            scanner.step(next);
        }
        scanner.masked
    }

    fn empty(capacity: usize) -> Self {
        Self { code: String::with_capacity(capacity), comments: String::with_capacity(capacity) }
    }

    /// The byte offsets at which `word` stands alone in the code.
    pub(crate) fn words<'a>(&'a self, word: &'a str) -> impl Iterator<Item = usize> + 'a {
        words(&self.code, word)
    }

    /// The offset of the brace that closes the one at `open`, or the end of an unbalanced source.
    pub(crate) fn closing_brace(&self, open: usize) -> usize {
        let mut depth = 0;
        for (offset, byte) in self.code.bytes().enumerate().skip(open) {
            match byte {
                b'{' => depth += 1,
                b'}' => depth -= 1,
                _ => continue,
            }
            if depth == 0 {
                return offset;
            }
        }
        self.code.len()
    }
}

/// The line, counted from 1, of a byte offset.
pub(crate) fn line_of(text: &str, offset: usize) -> usize {
    1 + text.as_bytes()[..offset].iter().filter(|&&byte| byte == b'\n').count()
}

/// The byte offsets at which `word` stands alone: no letter, digit or underscore beside it.
pub(crate) fn words<'a>(text: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(word).map(|(offset, _)| offset).filter(move |&offset| {
        let before = text[..offset].chars().next_back();
        let after = text[offset + word.len()..].chars().next();
        !before.is_some_and(is_word) && !after.is_some_and(is_word)
    })
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Code,
    Comment,
    Literal,
}

struct Scanner<'a> {
    rest: &'a str,
    masked: Masked,
}

impl Scanner<'_> {
    /// Takes one comment, one literal or one character of code.
    fn step(&mut self, next: char) {
        if self.rest.starts_with("//") {
            let end = self.rest.find('\n').unwrap_or(self.rest.len());
            self.take(end, Kind::Comment);
        } else if self.rest.starts_with("/*") {
            self.take(block_comment_len(self.rest), Kind::Comment);
        } else if let Some((prefix_len, num_hashes)) = raw_string_start(self.rest)
            && !self.follows_word()
        {
            self.take(prefix_len, Kind::Code);
            let close = format!("\"{}", "#".repeat(num_hashes));
            let end = self.rest.find(&close).unwrap_or(self.rest.len());
            self.take(end, Kind::Literal);
            self.take(close.len().min(self.rest.len()), Kind::Code);
        } else if next == '"' {
            self.take_quoted('"');
        } else if next == '\'' && is_char_literal(self.rest) {
            self.take_quoted('\'');
        } else {
            self.take(next.len_utf8(), Kind::Code);
        }
    }

    /// A literal in which a backslash escapes the next character; its quotes remain as code.
    fn take_quoted(&mut self, quote: char) {
        self.take(1, Kind::Code);
        let mut escaped = false;
        let end = self.rest.find(|c| {
            let closes = c == quote && !escaped;
            escaped = c == '\\' && !escaped;
            closes
        });
        self.take(end.unwrap_or(self.rest.len()), Kind::Literal);
        self.take(1.min(self.rest.len()), Kind::Code);
    }

    /// Whether the last character was part of a word, as the `r` of `for"` would be.
    fn follows_word(&self) -> bool {
        self.masked.code.chars().next_back().is_some_and(|c| c.is_alphanumeric() || c == '_')
    }

    fn take(&mut self, num_bytes: usize, kind: Kind) {
        let (taken, rest) = self.rest.split_at(num_bytes);
        for (target, shown) in
            [(&mut self.masked.code, Kind::Code), (&mut self.masked.comments, Kind::Comment)]
        {
            if kind == shown {
                target.push_str(taken);
            } else {
                target.extend(taken.bytes().map(|b| if b == b'\n' { '\n' } else { ' ' }));
            }
        }
        self.rest = rest;
    }
}

/// Block comments nest in Rust.
fn block_comment_len(text: &str) -> usize {
    let mut depth = 0;
    let mut at = 0;
    while at < text.len() {
        let rest = &text.as_bytes()[at..];
        if rest.starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if rest.starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    text.len()
}

/// The length of `r#"`, `br"`, `cr##"` and the like at the start of `text`, and the hashes in it.
fn raw_string_start(text: &str) -> Option<(usize, usize)> {
    let prefix = ["r", "br", "cr"].into_iter().find(|&prefix| {
        let after = text.strip_prefix(prefix);
        after.is_some_and(|after| after.trim_start_matches('#').starts_with('"'))
    })?;
    let num_hashes = text[prefix.len()..].bytes().take_while(|&byte| byte == b'#').count();
    Some((prefix.len() + num_hashes + 1, num_hashes))
}

/// Tells `'a'` and `'\n'` from the lifetime `'a`.
fn is_char_literal(text: &str) -> bool {
    let mut chars = text.chars().skip(1);
    match (chars.next(), chars.next()) {
        (Some('\\'), _) => true,
        (Some(_), Some(close)) => close == '\'',
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_keeps_only_code() {
        let table = [
            ("let a = 1;", "let a = 1;"),
            ("a // { b\nc", "a       \nc"),
            ("a /* { /* } */ { */ b", "a                   b"),
            ("a /* open", "a        "),
            ("f(\"{ // \", x)", "f(\"     \", x)"),
            (r#"f("\"{", x)"#, "f(\"   \", x)"),
            (r#"f("\\", '{')"#, "f(\"  \", ' ')"),
            ("r\"{\\\" }", "r\"  \" }"),
            ("r#\"{\"}\"# }", "r#\"   \"# }"),
            ("br##\"{\"#\"## }", "br##\"   \"## }"),
            ("b\"{\" c\"{\" b'{'", "b\" \" c\" \" b' '"),
            ("r#type for\"{\"", "r#type for\" \""),
            ("<'a, 'static> '{' '\\'' '\\\\' {", "<'a, 'static> ' ' '  ' '  ' {"),
            ("'é' é \"é\"", "'  ' é \"  \""),
            ("\"a\n{\" b", "\" \n \" b"),
            ("'label: loop {", "'label: loop {"),
        ];
        for (source, expected) in table {
            let masked = Masked::new(source);
            assert_eq!(masked.code, expected, "{source}");
            assert_eq!(masked.code.len(), source.len(), "{source}");
            assert_eq!(masked.comments.len(), source.len(), "{source}");
        }
    }

    #[test]
    fn comments_keep_only_comments() {
        let table = [
            ("a // b \"c\"\nd", "  // b \"c\"\n "),
            ("\"// a\" /* b */ c", "       /* b */  "),
            ("/// doc\nfn f() {}", "/// doc\n         "),
        ];
        for (source, expected) in table {
            assert_eq!(Masked::new(source).comments, expected, "{source}");
        }
    }

    #[test]
    fn words_stand_alone() {
        let found: Vec<usize> = words("fn fnord _fn fn_ (fn) fn", "fn").collect();
        assert_eq!(found, [0, 18, 22]);
    }

    #[test]
    fn braces_match_across_literals() {
        let masked = Masked::new("{ '{' { \"}\" } } }");
        assert_eq!(masked.closing_brace(0), 14);
        assert_eq!(Masked::new("{ {").closing_brace(0), 3);
        assert_eq!(line_of("a\nb\nc", 4), 3);
    }
}
