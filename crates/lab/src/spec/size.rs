// SPDX-License-Identifier: Apache-2.0
//! Sizes with a unit.

/// Parses `96M`, `1G`, `512K` or a plain number of bytes; units are binary.
///
/// # Errors
/// A sentence that says what is wrong.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let split = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let (digits, unit) = text.split_at(split);
    let shift = match unit.trim() {
        "" => 0,
        "K" | "KiB" => 10,
        "M" | "MiB" => 20,
        "G" | "GiB" => 30,
        other => {
            return Err(format!(
                "size `{text}` has the unit `{other}`; use K, M or G"
            ));
        }
    };
    let number: u64 = digits
        .parse()
        .map_err(|_| format!("size `{text}` has no number; write for example 96M"))?;
    number
        .checked_mul(1 << shift)
        .ok_or_else(|| format!("size `{text}` is too large"))
}

#[cfg(test)]
mod tests {
    use super::parse_size;

    #[test]
    fn sizes_are_binary() {
        assert_eq!(parse_size("96M"), Ok(96 << 20));
        assert_eq!(parse_size("2 GiB"), Ok(2 << 30));
        assert_eq!(parse_size("512"), Ok(512));
    }

    #[test]
    fn an_unknown_unit_is_named() {
        assert!(parse_size("96MB").unwrap_err().contains("`MB`"));
        assert!(parse_size("M").is_err());
        assert!(parse_size("99999999999999G").is_err());
    }
}
