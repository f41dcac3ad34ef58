//! A command's manual: the sections after its options, in `--help` and in its man page.

use std::fmt::Write as _;
use std::io;

use clap::Command;

/// The sections of a command's manual after synopsis, description and options.
#[derive(Debug, Clone, Copy)]
pub struct Manual {
    /// Command lines, each with a description.
    pub examples: &'static [(&'static str, &'static str)],
    /// Paragraphs with headings: costs, limits, how things work.
    pub notes: &'static [(&'static str, &'static str)],
    /// Exit codes other than 0, 1 and 2, with their meaning.
    pub exit: &'static [(&'static str, &'static str)],
    /// Files that the command reads or leaves.
    pub files: &'static [(&'static str, &'static str)],
    /// Other commands of aquifer, or pages as `mkswap(8)`.
    pub see_also: &'static [&'static str],
}

/// Exit codes that every command has.
const EXIT: [(&str, &str); 3] =
    [("0", "done"), ("1", "failed"), ("2", "misuse: the command line is invalid")];

/// The width of paragraphs in columns; no usual terminal breaks such lines.
const TEXT_WIDTH: usize = 76;

impl Manual {
    /// An empty manual, the base of the others.
    pub const NONE: Self = Self { examples: &[], notes: &[], exit: &[], files: &[], see_also: &[] };

    /// Adds this manual at the end of the command's `--help`.
    pub fn attach(&self, command: Command) -> Command {
        command
            .after_help("--help shows details, examples and exit codes.")
            .after_long_help(self.text())
    }

    /// Returns the sections as text.
    fn text(&self) -> String {
        let mut text = String::new();
        for section in self.sections() {
            if !text.is_empty() {
                text.push('\n');
            }
            section.write_text(&mut text);
        }
        text
    }

    /// Writes the man page of `command`, which `words` name (`aquifer`, `vm`, `start`).
    ///
    /// # Errors
    /// If `out` cannot be written.
    pub fn page(
        &self,
        command: &Command,
        words: &[&str],
        out: &mut dyn io::Write,
    ) -> io::Result<()> {
        let name = words.join("-");
        // The page's own name has a dash, the command line in its synopsis a blank.
        let page = clap_mangen::Man::new(command.clone().bin_name(words.join(" ")))
            .title(name.to_uppercase())
            .section("1")
            .source(concat!("aquifer ", env!("CARGO_PKG_VERSION")))
            .manual("Aquifer");
        page.render_title(out)?;
        writeln!(out, ".SH NAME\n{} \\- {}", roff(&name), roff(&about(command)))?;
        page.render_synopsis_section(out)?;
        page.render_description_section(out)?;
        if command.get_arguments().any(|argument| !argument.is_hide_set()) {
            page.render_options_section(out)?;
        }
        if command.has_subcommands() {
            page.render_subcommands_section(out)?;
        }
        self.sections().iter().try_for_each(|section| section.write_roff(out))
    }

    fn sections(&self) -> Vec<Section> {
        let mut sections = Vec::new();
        let mut add =
            |heading: &str, body| sections.push(Section { heading: heading.to_owned(), body });
        if !self.examples.is_empty() {
            add("Examples", Body::Examples(self.examples));
        }
        for (heading, paragraph) in self.notes {
            add(heading, Body::Paragraph((*paragraph).to_owned()));
        }
        add("Exit status", Body::List(EXIT.iter().chain(self.exit).copied().collect()));
        if !self.files.is_empty() {
            add("Files", Body::List(self.files.to_vec()));
        }
        if !self.see_also.is_empty() {
            add("See also", Body::Paragraph(self.see_also.join(", ")));
        }
        sections
    }
}

struct Section {
    heading: String,
    body: Body,
}

enum Body {
    Paragraph(String),
    Examples(&'static [(&'static str, &'static str)]),
    List(Vec<(&'static str, &'static str)>),
}

impl Section {
    fn write_text(&self, out: &mut String) {
        let _ = writeln!(out, "{}:", self.heading);
        match &self.body {
            Body::Paragraph(text) => {
                out.extend(fold(text, TEXT_WIDTH).map(|line| format!("  {line}\n")))
            }
            Body::Examples(examples) => {
                for (command, what) in *examples {
                    let _ = writeln!(out, "  {what}:\n      {command}");
                }
            }
            Body::List(items) => {
                let width = items.iter().map(|(term, _)| term.len()).max().unwrap_or(0);
                for (term, what) in items {
                    let _ = writeln!(out, "  {term:width$}  {what}");
                }
            }
        }
    }

    fn write_roff(&self, out: &mut dyn io::Write) -> io::Result<()> {
        writeln!(out, ".SH {}", roff(&self.heading.to_uppercase()))?;
        match &self.body {
            Body::Paragraph(text) => writeln!(out, "{}", roff(text)),
            Body::Examples(examples) => examples.iter().try_for_each(|(command, what)| {
                writeln!(out, ".PP\n{}:\n.PP\n.RS 4\n.EX\n{}\n.EE\n.RE", roff(what), roff(command))
            }),
            Body::List(items) => items.iter().try_for_each(|(term, what)| {
                writeln!(out, ".TP\n\\fB{}\\fR\n{}", roff(term), roff(what))
            }),
        }
    }
}

/// Returns the command's one-line description.
fn about(command: &Command) -> String {
    command.get_about().map(ToString::to_string).unwrap_or_default()
}

/// Escapes all that troff would interpret: backslashes, dashes, control lines.
pub(crate) fn roff(text: &str) -> String {
    let escaped = text.replace('\\', "\\e").replace('-', "\\-");
    let guard = |line: &str| {
        if line.starts_with(['.', '\'']) { format!("\\&{line}") } else { line.to_owned() }
    };
    escaped.lines().map(guard).collect::<Vec<_>>().join("\n")
}

/// Breaks `text` at blanks into lines of at most `width` columns.
pub(crate) fn fold(text: &str, width: usize) -> impl Iterator<Item = String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let fits = lines
            .last()
            .is_some_and(|line| line.is_empty() || line.len() + 1 + word.len() <= width);
        if !fits {
            lines.push(String::new());
        }
        if let Some(line) = lines.last_mut() {
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
    }
    lines.into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_notes_are_folded_at_blanks() {
        let lines: Vec<_> = fold("one two  three\nfour", 9).collect();
        assert_eq!(lines, ["one two", "three", "four"]);
    }

    #[test]
    fn troff_takes_nothing_of_the_text_for_its_own() {
        assert_eq!(roff(".TH\n--local 'a\\b'"), "\\&.TH\n\\-\\-local 'a\\eb'");
    }
}
