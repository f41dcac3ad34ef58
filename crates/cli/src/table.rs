//! Tables for people: headings with their alignments, and rows.

use comfy_table::{CellAlignment, Row, Table, presets};

/// A column's heading, which decides its alignment.
#[derive(Clone, Debug)]
pub enum Column {
    /// Aligned to the left.
    Words(String),
    /// Aligned to the right.
    Numbers(String),
}

impl Column {
    /// Makes the heading of a column of numbers.
    pub fn numbers(heading: &str) -> Self {
        Self::Numbers(heading.to_owned())
    }
}

impl<T: Into<String>> From<T> for Column {
    fn from(heading: T) -> Self {
        Self::Words(heading.into())
    }
}

/// Returns the rows as aligned columns below their headings, without a line end after the last.
pub fn table<R: Into<Row>>(
    columns: impl IntoIterator<Item: Into<Column>>,
    rows: impl IntoIterator<Item = R>,
) -> String {
    let (alignments, headings): (Vec<_>, Vec<_>) = columns
        .into_iter()
        .map(|column| match column.into() {
            Column::Words(heading) => (CellAlignment::Left, heading),
            Column::Numbers(heading) => (CellAlignment::Right, heading),
        })
        .unzip();
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(headings);
    for (column, alignment) in table.column_iter_mut().zip(alignments) {
        column.set_cell_alignment(alignment);
    }
    table.add_rows(rows);
    table.trim_fmt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_stand_to_the_left_and_numbers_to_the_right() {
        let columns = [Column::from("NAME"), Column::numbers("SIZE"), "STATE".into()];
        let rows = [["a", "12345", "served"], ["longer", "7", ""]];
        assert_eq!(
            table(columns, rows),
            " NAME     SIZE  STATE\n a       12345  served\n longer      7"
        );
    }
}
