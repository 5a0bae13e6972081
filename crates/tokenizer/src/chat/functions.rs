//! What templates of `transformers` may call, and the one tag that only it knows.

use std::borrow::Cow;
use std::io;
use std::sync::LazyLock;

use fancy_regex::Regex;
use jiff::Zoned;
use minijinja::value::Kwargs;
use minijinja::{Error, ErrorKind, Value};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

/// The deepest indentation of `tojson`: a template may not ask for memory without bound.
const MAX_INDENT: usize = 16;

/// The cause of an error that a template raised on purpose.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Refusal(pub(super) String);

/// `raise_exception(message)`: the template does not accept the messages.
pub(super) fn raise_exception(message: String) -> Result<Value, Error> {
    let error = Error::new(ErrorKind::InvalidOperation, message.clone());
    Err(error.with_source(Refusal(message)))
}

/// `strftime_now(format)`: the local time, as Python's `datetime.now().strftime` writes it.
pub(super) fn strftime_now(format: &str) -> Result<String, Error> {
    strftime(format, &Zoned::now())
}

fn strftime(format: &str, now: &Zoned) -> Result<String, Error> {
    jiff::fmt::strtime::format(format, now)
        .map_err(|error| Error::new(ErrorKind::InvalidOperation, error.to_string()))
}

/// `tojson`, as `json.dumps(value, ensure_ascii=False)` writes it: spaces after `,` and `:`.
///
/// The library's own filter escapes for HTML, which models were not trained on.
pub(super) fn tojson(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let ensure_ascii: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let mut json = match indent {
        Some(width) if width > MAX_INDENT => {
            let reason = format!("tojson: indent {width} is over {MAX_INDENT}");
            return Err(Error::new(ErrorKind::InvalidOperation, reason));
        }
        Some(width) => write_json(value, PrettyFormatter::with_indent(&b" ".repeat(width)))?,
        None => write_json(value, PythonFormatter)?,
    };
    if ensure_ascii == Some(true) {
        json = escape_beyond_ascii(&json);
    }
    Ok(Value::from_safe_string(json))
}

fn write_json(value: &Value, formatter: impl Formatter) -> Result<String, Error> {
    let bad = |reason: String| Error::new(ErrorKind::BadSerialization, reason);
    let mut json = Vec::new();
    value
        .serialize(&mut Serializer::with_formatter(&mut json, formatter))
        .map_err(|error| bad(error.to_string()))?;
    String::from_utf8(json).map_err(|error| bad(error.to_string()))
}

/// Escapes as `json.dumps(..., ensure_ascii=True)`: in UTF-16 units. Only strings hold such text.
fn escape_beyond_ascii(json: &str) -> String {
    let mut escaped = String::with_capacity(json.len());
    for c in json.chars() {
        if c.is_ascii() {
            escaped.push(c);
        } else {
            for unit in c.encode_utf16(&mut [0; 2]) {
                escaped += &format!("\\u{unit:04x}");
            }
        }
    }
    escaped
}

/// One line with Python's default separators.
struct PythonFormatter;

impl Formatter for PythonFormatter {
    fn begin_array_value<W: ?Sized + io::Write>(
        &mut self,
        w: &mut W,
        first: bool,
    ) -> io::Result<()> {
        if first { Ok(()) } else { w.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(
        &mut self,
        w: &mut W,
        first: bool,
    ) -> io::Result<()> {
        if first { Ok(()) } else { w.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, w: &mut W) -> io::Result<()> {
        w.write_all(b": ")
    }
}

/// Rewrites `{% generation %}` blocks, which mark the assistant's tokens for training, as plain
/// scopes; whitespace control stays.
pub(super) fn without_generation_tags(source: &str) -> String {
    static TAG: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}").expect("the pattern is constant")
    });
    let plain: Cow<'_, str> = TAG.replace_all(source, "{%$1 ${2}with $3%}");
    plain.into_owned()
}

#[cfg(test)]
mod tests {
    use jiff::civil::date;
    use jiff::tz::TimeZone;

    use super::*;

    #[test]
    fn dates_as_python_writes_them() {
        let now = date(2024, 7, 6).at(9, 5, 3, 0).to_zoned(TimeZone::UTC).unwrap();
        // python3: datetime(2024, 7, 6, 9, 5, 3).strftime(...)
        assert_eq!(strftime("%d %b %Y", &now).unwrap(), "06 Jul 2024");
        assert_eq!(strftime("%Y-%m-%d %H:%M:%S", &now).unwrap(), "2024-07-06 09:05:03");
        assert_eq!(
            strftime("%A, %B %-d, %I %p %j %y %%", &now).unwrap(),
            "Saturday, July 6, 09 AM 188 24 %"
        );
        assert!(strftime("%Q%", &now).is_err());
    }

    #[test]
    fn generation_tags_become_scopes() {
        assert_eq!(
            without_generation_tags("a{%- generation -%}b{% endgeneration +%}{% if generation %}"),
            "a{%- with -%}b{% endwith +%}{% if generation %}"
        );
    }
}
