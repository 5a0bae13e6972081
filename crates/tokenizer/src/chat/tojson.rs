//! The `tojson` filter, as Python's `json.dumps` writes it.
//!
//! The template library's own filter escapes for HTML, which models were not trained on.

use std::io::{self, Write};

use minijinja::value::{Kwargs, Value};
use minijinja::{Error, ErrorKind};
use serde::Serialize;
use serde_json::ser::{Formatter, Serializer};

/// The deepest indentation: a template may not ask for memory without bound.
const MAX_INDENT: usize = 16;

/// `tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
pub(super) fn tojson(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let style = PythonFormatter::from_options(&options)?;
    let ensure_ascii: Option<bool> = options.get("ensure_ascii")?;
    let sort_keys: Option<bool> = options.get("sort_keys")?;
    options.assert_all_used()?;
    let bad = |reason: String| Error::new(ErrorKind::BadSerialization, reason);
    let mut tree = serde_json::to_value(value).map_err(|error| bad(error.to_string()))?;
    if sort_keys == Some(true) {
        tree.sort_all_objects();
    }
    let mut json = Vec::new();
    tree.serialize(&mut Serializer::with_formatter(&mut json, style))
        .map_err(|error| bad(error.to_string()))?;
    let mut json = String::from_utf8(json).map_err(|error| bad(error.to_string()))?;
    if ensure_ascii == Some(true) {
        json = escape_beyond_ascii(&json);
    }
    Ok(Value::from_safe_string(json))
}

/// Escapes DEL and what lies beyond ASCII in UTF-16 units; in JSON only strings hold them.
fn escape_beyond_ascii(json: &str) -> String {
    let mut escaped = String::with_capacity(json.len());
    for c in json.chars() {
        if c.is_ascii() && c != '\x7f' {
            escaped.push(c);
        } else {
            for unit in c.encode_utf16(&mut [0; 2]) {
                escaped += &format!("\\u{unit:04x}");
            }
        }
    }
    escaped
}

/// Python's separators, line breaks and numbers.
struct PythonFormatter {
    item_separator: String,
    key_separator: String,
    /// Spaces for each level; `None` writes one line.
    indent: Option<usize>,
    depth: usize,
    is_empty: bool,
}

impl PythonFormatter {
    fn from_options(options: &Kwargs) -> Result<Self, Error> {
        let indent: Option<usize> = options.get("indent")?;
        if let Some(width) = indent.filter(|&width| width > MAX_INDENT) {
            let reason = format!("tojson: indent {width} is over {MAX_INDENT}");
            return Err(Error::new(ErrorKind::InvalidOperation, reason));
        }
        let separators: Option<Vec<String>> = options.get("separators")?;
        let (item_separator, key_separator) = match separators.as_deref() {
            None => (if indent.is_some() { "," } else { ", " }, ": "),
            Some([item, key]) => (item.as_str(), key.as_str()),
            Some(_) => {
                let reason = "tojson: separators must be two strings";
                return Err(Error::new(ErrorKind::InvalidOperation, reason));
            }
        };
        Ok(Self {
            item_separator: item_separator.to_string(),
            key_separator: key_separator.to_string(),
            indent,
            depth: 0,
            is_empty: true,
        })
    }

    fn begin(&mut self) {
        self.depth += 1;
        self.is_empty = true;
    }

    fn item<W: ?Sized + Write>(&mut self, w: &mut W, is_first: bool) -> io::Result<()> {
        if !is_first {
            w.write_all(self.item_separator.as_bytes())?;
        }
        self.is_empty = false;
        self.break_line(w)
    }

    fn end<W: ?Sized + Write>(&mut self, w: &mut W) -> io::Result<()> {
        self.depth -= 1;
        if self.is_empty {
            self.is_empty = false;
            return Ok(());
        }
        self.break_line(w)
    }

    fn break_line<W: ?Sized + Write>(&self, w: &mut W) -> io::Result<()> {
        match self.indent {
            Some(width) => write!(w, "\n{:1$}", "", width * self.depth),
            None => Ok(()),
        }
    }
}

impl Formatter for PythonFormatter {
    fn write_f64<W: ?Sized + Write>(&mut self, w: &mut W, value: f64) -> io::Result<()> {
        w.write_all(python_float(value).as_bytes())
    }

    fn begin_array<W: ?Sized + Write>(&mut self, w: &mut W) -> io::Result<()> {
        self.begin();
        w.write_all(b"[")
    }

    fn begin_array_value<W: ?Sized + Write>(&mut self, w: &mut W, first: bool) -> io::Result<()> {
        self.item(w, first)
    }

    fn end_array<W: ?Sized + Write>(&mut self, w: &mut W) -> io::Result<()> {
        self.end(w)?;
        w.write_all(b"]")
    }

    fn begin_object<W: ?Sized + Write>(&mut self, w: &mut W) -> io::Result<()> {
        self.begin();
        w.write_all(b"{")
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, w: &mut W, first: bool) -> io::Result<()> {
        self.item(w, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, w: &mut W) -> io::Result<()> {
        w.write_all(self.key_separator.as_bytes())
    }

    fn end_object<W: ?Sized + Write>(&mut self, w: &mut W) -> io::Result<()> {
        self.end(w)?;
        w.write_all(b"}")
    }
}

/// A finite number as Python's `repr` writes it: the shortest digits, in powers of ten below 1e-4
/// and from 1e16 on, with a sign and two digits in the exponent.
fn python_float(value: f64) -> String {
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    match exponent.parse::<i32>() {
        Ok(exponent) if value != 0.0 && !(-4..16).contains(&exponent) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", exponent.abs())
        }
        _ => format!("{value:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_as_python_writes_them() {
        // python3: [repr(x) for x in (...)]
        let check = |value: f64, expected: &str| assert_eq!(python_float(value), expected);
        check(1.0, "1.0");
        check(-0.0, "-0.0");
        check(0.1, "0.1");
        check(1e-4, "0.0001");
        check(1.5e-5, "1.5e-05");
        check(1e15, "1000000000000000.0");
        check(1e16, "1e+16");
        check(-1.25e300, "-1.25e+300");
        check(5e-324, "5e-324");
    }
}
