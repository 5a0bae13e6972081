//! The files of a batch: lines that come in, and those that have been answered already.

use std::collections::{HashMap, HashSet};
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::Path;

use super::error::BatchError;
use super::line::{InputLine, OutputLine, WrittenLine};

/// The requests, line by line, but for those that were answered before.
pub(super) struct Input {
    file: BufReader<File>,
    path: String,
    max_line_bytes: usize,
    /// Lines read.
    number: u64,
    answered: HashMap<u64, Option<String>>,
    /// Names that came so far.
    names: HashSet<String>,
}

/// A line that is to be answered.
pub(super) struct Numbered {
    /// From 1.
    pub(super) number: u64,
    /// Or its answer, if it is no request.
    pub(super) line: Result<InputLine, Box<OutputLine>>,
}

/// The answers. Locked: no other process writes them.
pub(super) struct Output {
    file: File,
    path: String,
}

/// Lines that have been answered, with their names.
pub(super) type Answered = HashMap<u64, Option<String>>;

impl Output {
    /// Opens a file to go on with, or makes a new one. A line that was not written whole is
    /// dropped.
    ///
    /// # Errors
    /// The file is of something else, or in use.
    pub(super) fn open(path: &Path) -> Result<(Self, Answered), BatchError> {
        let name = path.display().to_string();
        let failed = |error| BatchError::File { path: name.clone(), error };
        let options =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).clone();
        let mut file = options.open(path).map_err(failed)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(BatchError::Busy { path: name }),
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
        let (answered, end) = read_answered(&file, &name)?;
        file.set_len(end).map_err(failed)?;
        file.seek(SeekFrom::Start(end)).map_err(failed)?;
        Ok((Self { file, path: name }, answered))
    }

    /// Appends a line. In one piece, without a buffer: what was written is there though the process
    /// be killed.
    pub(super) fn write(&mut self, line: &OutputLine) -> Result<(), BatchError> {
        let written = self.file.write_all(line.to_text().as_bytes());
        written.map_err(|error| BatchError::File { path: self.path.clone(), error })
    }

    /// Waits until all that was written is on the disk.
    pub(super) fn sync(&self) -> Result<(), BatchError> {
        let synced = self.file.sync_data();
        synced.map_err(|error| BatchError::File { path: self.path.clone(), error })
    }
}

/// Which lines have their answers, and where the last whole one ends.
fn read_answered(file: &File, path: &str) -> Result<(Answered, u64), BatchError> {
    let mut reader = BufReader::new(file);
    let (mut answered, mut end, mut text) = (Answered::new(), 0, Vec::new());
    for line in 1.. {
        text.clear();
        let read = reader.read_until(b'\n', &mut text);
        read.map_err(|error| BatchError::File { path: path.to_owned(), error })?;
        if text.last() != Some(&b'\n') {
            break;
        }
        let foreign = |reason: String| BatchError::Foreign { path: path.to_owned(), line, reason };
        let written: WrittenLine =
            serde_json::from_slice(&text).map_err(|error| foreign(error.to_string()))?;
        let number = written.number().ok_or_else(|| foreign("its `id` is another's".to_owned()))?;
        if answered.insert(number, written.custom_id).is_some() {
            return Err(foreign(format!("line {number} of the input is answered twice")));
        }
        end += text.len() as u64;
    }
    Ok((answered, end))
}

impl Input {
    /// Opens the requests; gives the number of lines, too.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(super) fn open(
        path: &Path,
        max_line_bytes: usize,
        answered: Answered,
    ) -> Result<(Self, u64), BatchError> {
        let name = path.display().to_string();
        let open = || -> io::Result<(File, u64)> {
            let num_lines = count_lines(BufReader::new(File::open(path)?))?;
            Ok((File::open(path)?, num_lines))
        };
        let (file, num_lines) =
            open().map_err(|error| BatchError::File { path: name.clone(), error })?;
        let (number, names) = (0, HashSet::new());
        let file = BufReader::new(file);
        let input = Self { file, path: name, max_line_bytes, number, answered, names };
        Ok((input, num_lines))
    }

    /// The next line that is to be answered; `None` at the end.
    ///
    /// # Errors
    /// The file cannot be read, or the answers are another file's.
    pub(super) fn next(&mut self) -> Result<Option<Numbered>, BatchError> {
        loop {
            let mut text = Vec::new();
            let is_whole = self.read_line(&mut text);
            let is_whole =
                is_whole.map_err(|error| BatchError::File { path: self.path.clone(), error })?;
            if text.is_empty() {
                return Ok(None);
            }
            self.number += 1;
            let number = self.number;
            if text.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            let line = if is_whole {
                InputLine::read(number, &text)
            } else {
                let message = format!("is over the limit of {} bytes", self.max_line_bytes);
                Err(Box::new(OutputLine::refused(number, None, "line_too_long", message)))
            };
            let line = line.and_then(|line| self.check_name(number, line));
            let name = line.as_ref().map_or_else(
                |refused| refused.custom_id().map(str::to_owned),
                |line| Some(line.custom_id.clone()),
            );
            match self.answered.get(&number) {
                None => return Ok(Some(Numbered { number, line })),
                Some(answered) if *answered == name => {}
                Some(answered) => {
                    let reason = format!("it answers {answered:?}, not {name:?}");
                    let line = usize::try_from(number).unwrap_or(usize::MAX);
                    return Err(BatchError::Foreign { path: self.path.clone(), line, reason });
                }
            }
        }
    }

    /// Whether the line is not too long; if it is, the rest of it is skipped.
    fn read_line(&mut self, text: &mut Vec<u8>) -> io::Result<bool> {
        let most = self.max_line_bytes as u64 + 1;
        self.file.by_ref().take(most).read_until(b'\n', text)?;
        let is_whole = text.last() == Some(&b'\n') || (text.len() as u64) < most;
        if !is_whole {
            self.file.skip_until(b'\n')?;
        }
        Ok(is_whole)
    }

    fn check_name(&mut self, number: u64, line: InputLine) -> Result<InputLine, Box<OutputLine>> {
        if self.names.insert(line.custom_id.clone()) {
            return Ok(line);
        }
        let message = format!("another line has the custom_id {:?}", line.custom_id);
        let refused =
            OutputLine::refused(number, Some(line.custom_id), "duplicate_custom_id", message);
        Err(Box::new(refused))
    }
}

/// Lines that are not blank.
fn count_lines(mut reader: impl BufRead) -> io::Result<u64> {
    let (mut count, mut is_blank) = (0, true);
    loop {
        let bytes = reader.fill_buf()?;
        if bytes.is_empty() {
            return Ok(count + u64::from(!is_blank));
        }
        for byte in bytes {
            if *byte == b'\n' {
                count += u64::from(!is_blank);
                is_blank = true;
            } else if !byte.is_ascii_whitespace() {
                is_blank = false;
            }
        }
        let len = bytes.len();
        reader.consume(len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blank_lines_do_not_count() {
        for (text, expected) in
            [("", 0), ("\n\n", 0), ("a", 1), ("a\n", 1), ("a\n \r\n\nb", 2), (" a\nb \n", 2)]
        {
            assert_eq!(count_lines(text.as_bytes()).unwrap(), expected, "{text:?}");
        }
    }
}
