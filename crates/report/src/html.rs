// SPDX-License-Identifier: Apache-2.0
//! Self-contained HTML pages with inline styles and pictures, for light and dark display.

/// Escapes text for HTML content and quoted attributes.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

/// Builds a complete page around an HTML body.
pub fn page(title: &str, body: &str) -> String {
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n\
         <title>{}</title>\n<style>\n{}</style>\n</head>\n<body>\n<main>\n{body}</main>\n</body>\n</html>\n",
        escape(title),
        include_str!("page.css")
    )
}

/// Builds a legend. Each entry is a CSS class and a name.
pub fn legend<'a>(entries: impl IntoIterator<Item = (&'a str, &'a str)>) -> String {
    let mut html = String::from("<ul class=\"legend\">");
    for (class, name) in entries {
        let (class, name) = (escape(class), escape(name));
        html.push_str(&format!("<li><i class=\"{class}\"></i>{name}</li>"));
    }
    html.push_str("</ul>\n");
    html
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_cannot_become_markup() {
        assert_eq!(
            escape("<a b='c' d=\"e\">&"),
            "&lt;a b=&#39;c&#39; d=&quot;e&quot;&gt;&amp;"
        );
    }

    #[test]
    fn a_page_loads_nothing_from_anywhere() {
        let page = page("t", "<p>x</p>");
        for word in ["http:", "https:", "src=", "href=", "@import", "url("] {
            assert!(!page.contains(word), "{word}");
        }
        assert!(page.contains("prefers-color-scheme"));
    }
}
