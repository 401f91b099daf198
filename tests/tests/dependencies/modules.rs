//! The modules of a crate as a graph, from its source: which module uses which, and whether that closes a circle.
//!
//! A file is read as tokens. So comments and strings do not count, and the code of every feature does. What is compiled for
//! tests alone (`#[cfg(test)]`) is left out.
//!
//! A path that a module names leads to the module where its item stands, through every name that is handed on: with
//! `pub use plan::ForwardPlan;` in the root, `crate::ForwardPlan` is a use of `plan`. Circles are looked for among the modules
//! of one folder. A parent and its children may use each other.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use proc_macro2::{Delimiter, Group, TokenStream, TokenTree};

/// The names from the crate's root to a module; empty for the root itself.
type Path = Vec<String>;

/// A crate whose files have been read.
#[derive(Default)]
pub struct Crate {
    modules: BTreeMap<Path, Module>,
    complaints: Vec<String>,
}

/// What the source of a module says.
#[derive(Default)]
struct Module {
    children: BTreeSet<String>,
    /// Items that it defines: functions, types, constants, macros.
    items: BTreeSet<String>,
    /// Names that its `use` declarations bring in, and the paths that they stand for.
    bindings: BTreeMap<String, Path>,
    /// Modules whose names it takes all.
    globs: Vec<Path>,
    /// Every path that it names, with where.
    mentions: Vec<Mention>,
    /// Every word that begins a path or stands alone, with its first place.
    words: BTreeMap<String, Mention>,
}

/// A path in the source.
#[derive(Clone)]
struct Mention {
    path: Path,
    file: String,
    line: usize,
}

/// Where tokens stand.
struct Place<'a> {
    file: &'a str,
    /// Where the files of child modules are: the folder, and the inline modules on the way.
    folder: String,
    module: Path,
}

impl Crate {
    /// Reads a crate from its root file; `text` gives the text of a file of the repository.
    pub fn read<'a>(root: &str, text: &dyn Fn(&str) -> Option<&'a str>) -> Self {
        let mut found = Self::default();
        let place = Place { file: root, folder: parent(root).into(), module: vec![] };
        found.file(&place, text);
        found
    }

    fn file<'a>(&mut self, place: &Place<'_>, text: &dyn Fn(&str) -> Option<&'a str>) {
        self.modules.entry(place.module.clone()).or_default();
        match text(place.file).map(str::parse::<TokenStream>) {
            Some(Ok(tokens)) => self.scan(tokens, place, true, text),
            Some(Err(error)) => self.complaints.push(format!("{}: {error}", place.file)),
            None => self.complaints.push(format!("{}: a module's file that is not there", place.file)),
        }
    }

    /// Reads tokens; `top` where they are the items of a module, and not within one of them.
    fn scan<'a>(&mut self, tokens: TokenStream, place: &Place<'_>, top: bool, text: &dyn Fn(&str) -> Option<&'a str>) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let mut at = 0;
        while at < tokens.len() {
            if let Some(attribute) = attribute(&tokens[at..]) {
                at += if is(tokens.get(at + 1), '!') { 3 } else { 2 };
                if for_tests(attribute) {
                    at += length_of_item(&tokens[at..]);
                } else {
                    self.scan(attribute.stream(), place, false, text);
                }
                continue;
            }
            match &tokens[at] {
                TokenTree::Group(group) => {
                    self.scan(group.stream(), place, false, text);
                    at += 1;
                }
                // `use<'a>` in a type is no declaration.
                TokenTree::Ident(word) if word == "use" && !is(tokens.get(at + 1), '<') => {
                    let length =
                        tokens[at..].iter().position(|token| is(Some(token), ';')).unwrap_or(tokens.len() - at);
                    self.declaration(&tokens[at + 1..at + length], &[], place, top);
                    at += length;
                }
                TokenTree::Ident(word) if top && word == "mod" => {
                    self.child(&tokens[at + 1..], place, text);
                    at += 3;
                }
                TokenTree::Ident(word) if top && DEFINES.iter().any(|define| word == define) => {
                    if let Some(TokenTree::Ident(name)) = tokens[at + 1..].iter().find(|token| !is(Some(token), '!')) {
                        self.module(place).items.insert(name.to_string());
                    }
                    at += 1;
                }
                TokenTree::Ident(first) => {
                    let path = path(&tokens[at..]);
                    let line = first.span().start().line;
                    // Behind `::` a path goes on: it is `<T>::b`, or one of another crate, `::a::b`.
                    let begins = !(at > 1 && is(tokens.get(at - 1), ':') && is(tokens.get(at - 2), ':'));
                    at += 3 * path.len() - 2;
                    if begins {
                        let word = Mention { path: path.clone(), file: place.file.into(), line };
                        let known = self.module(place).words.entry(path[0].clone()).or_insert_with(|| word.clone());
                        if known.path.len() < path.len() {
                            *known = word;
                        }
                    }
                    if begins && path.len() > 1 {
                        self.mention(path, line, place);
                    }
                }
                _ => at += 1,
            }
        }
    }

    fn module(&mut self, place: &Place<'_>) -> &mut Module {
        self.modules.entry(place.module.clone()).or_default()
    }

    fn mention(&mut self, path: Path, line: usize, place: &Place<'_>) {
        let file = place.file.to_owned();
        self.module(place).mentions.push(Mention { path, file, line });
    }

    /// A child module: its name, and a body or a `;`.
    fn child<'a>(&mut self, tokens: &[TokenTree], place: &Place<'_>, text: &dyn Fn(&str) -> Option<&'a str>) {
        let (Some(TokenTree::Ident(name)), Some(body)) = (tokens.first(), tokens.get(1)) else { return };
        let name = name.to_string();
        self.module(place).children.insert(name.clone());
        let module: Path = place.module.iter().cloned().chain([name.clone()]).collect();
        let folder = format!("{}/{name}", place.folder);
        if let TokenTree::Group(group) = body {
            let place = Place { file: place.file, folder, module };
            self.modules.entry(place.module.clone()).or_default();
            return self.scan(group.stream(), &place, true, text);
        }
        let beside = format!("{folder}.rs");
        let within = format!("{folder}/mod.rs");
        let file = if text(&beside).is_some() { &beside } else { &within };
        self.file(&Place { file, folder, module }, text);
    }

    /// The tree of a `use` declaration, behind what comes before its braces.
    fn declaration(&mut self, tokens: &[TokenTree], before: &[String], place: &Place<'_>, top: bool) {
        for tree in tokens.split(|token| is(Some(token), ',')) {
            let mut path = before.to_vec();
            let mut line = 0;
            let mut name = None;
            let mut glob = false;
            let mut parts = tree.iter();
            while let Some(token) = parts.next() {
                match token {
                    TokenTree::Ident(word) if word == "as" => {
                        name = parts.next().map(ToString::to_string);
                    }
                    TokenTree::Ident(word) => {
                        line = word.span().start().line;
                        path.push(word.to_string());
                    }
                    TokenTree::Group(group) => {
                        let inner: Vec<TokenTree> = group.stream().into_iter().collect();
                        self.declaration(&inner, &path, place, top);
                        path.clear();
                    }
                    TokenTree::Punct(punct) if punct.as_char() == '*' => {
                        line = punct.span().start().line;
                        glob = true;
                    }
                    _ => (),
                }
            }
            // `use a::{self}` is `use a`.
            if path.len() > 1 && path.last().is_some_and(|last| last == "self") {
                path.pop();
            }
            let Some(last) = path.last().cloned() else { continue };
            if top && glob {
                self.module(place).globs.push(path.clone());
            } else if top {
                self.module(place).bindings.insert(name.unwrap_or(last), path.clone());
            }
            self.mention(path, line, place);
        }
    }

    /// The modules that a path leads through, as a module names it; the last is where its item stands. None for a path of
    /// another crate.
    fn targets(&self, from: &Path, path: &[String], depth: usize) -> Vec<Path> {
        let Some((first, rest)) = path.split_first() else { return vec![] };
        match first.as_str() {
            "crate" => self.walk(vec![], rest, depth),
            "self" => self.walk(from.clone(), rest, depth),
            "super" => self.walk(from[..from.len().saturating_sub(1)].to_vec(), rest, depth),
            _ if self.modules.get(from).is_some_and(|module| module.children.contains(first)) => {
                self.walk(from.clone(), path, depth)
            }
            _ => vec![],
        }
    }

    /// The same from a module on.
    fn walk(&self, mut at: Path, mut rest: &[String], depth: usize) -> Vec<Path> {
        // Two globs of each other's names would go on for ever.
        if depth > 20 {
            return vec![];
        }
        while let Some((name, after)) = rest.split_first() {
            let Some(module) = self.modules.get(&at) else { return vec![] };
            if name == "super" {
                at.pop();
            } else if module.children.contains(name) {
                at.push(name.clone());
            } else if module.items.contains(name) {
                break;
            } else if let Some(path) = module.bindings.get(name) {
                let path: Path = path.iter().chain(after).cloned().collect();
                let further = self.targets(&at, &path, depth + 1);
                return [at].into_iter().chain(further).collect();
            } else if let Some(provider) = self.provider(&at, name, depth) {
                let further = self.walk(provider, rest, depth + 1);
                return [at].into_iter().chain(further).collect();
            } else {
                break;
            }
            rest = after;
        }
        vec![at]
    }

    /// The module from which a module takes a name by a glob.
    fn provider(&self, module: &Path, name: &String, depth: usize) -> Option<Path> {
        let globs = &self.modules.get(module)?.globs;
        let mut all = globs.iter().filter_map(|glob| self.targets(module, glob, depth + 1).pop());
        all.find(|from| {
            self.modules
                .get(from)
                .is_some_and(|m| m.children.contains(name) || m.items.contains(name) || m.bindings.contains_key(name))
        })
    }

    /// What a module names: the paths in its source, and the words that it has by taking all names of a module around it.
    fn mentions(&self, at: &Path) -> Vec<Mention> {
        let module = &self.modules[at];
        let mut mentions = module.mentions.clone();
        for glob in &module.globs {
            let around = self.targets(at, glob, 0).pop().filter(|around| at.starts_with(around));
            let Some(names) = around.and_then(|around| self.modules.get(&around)) else { continue };
            // A module's name alone may be a variable's.
            let given = module.words.iter().filter(|(word, mention)| {
                names.bindings.contains_key(*word) || (names.children.contains(*word) && mention.path.len() > 1)
            });
            mentions.extend(given.map(|(_, mention)| Mention {
                path: glob.iter().chain(&mention.path).cloned().collect(),
                ..mention.clone()
            }));
        }
        mentions
    }

    /// What is wrong with the crate: for each folder of modules its shortest circle.
    pub fn complaints(&self) -> Vec<String> {
        let mut complaints = self.complaints.clone();
        // Of each module with children: which child uses which, and the first place where.
        let mut graphs: BTreeMap<&[String], Graph> = BTreeMap::new();
        for from in self.modules.keys() {
            for mention in self.mentions(from) {
                for target in self.targets(from, &mention.path, 0) {
                    let shared = from.iter().zip(&target).take_while(|(a, b)| a == b).count();
                    if let (Some(user), Some(used)) = (from.get(shared), target.get(shared)) {
                        let uses = graphs.entry(&from[..shared]).or_default().entry(user.clone()).or_default();
                        uses.entry(used.clone()).or_insert_with(|| mention.clone());
                    }
                }
            }
        }
        for (folder, graph) in graphs {
            let circles = circles(&graph);
            let Some(circle) = circles.iter().min_by_key(|circle| circle.len()) else { continue };
            let of = if folder.is_empty() { String::new() } else { format!(" of {}", folder.join("::")) };
            let mut text =
                format!("the modules{of} use each other in a circle: {} -> {}", circle.join(" -> "), circle[0]);
            for (user, used) in circle.iter().zip(circle.iter().cycle().skip(1)) {
                let Mention { path, file, line, .. } = &graph[user][used];
                text += &format!("\n  {file}:{line}: {user} uses {used}: {}", path.join("::"));
            }
            let more: Vec<&str> =
                circles.iter().map(|way| way[0].as_str()).filter(|name| !circle.iter().any(|x| x == name)).collect();
            if !more.is_empty() {
                text += &format!("\n  in circles too: {}", more.join(", "));
            }
            complaints.push(text);
        }
        complaints
    }
}

type Graph = BTreeMap<String, BTreeMap<String, Mention>>;

/// For each module that has one, the shortest way back to itself.
fn circles(graph: &Graph) -> Vec<Path> {
    let back = |start: &String| {
        let mut ways = VecDeque::from([vec![start.clone()]]);
        let mut seen = BTreeSet::new();
        while let Some(way) = ways.pop_front() {
            for next in graph.get(way.last()?).into_iter().flat_map(BTreeMap::keys) {
                if next == start {
                    return Some(way);
                }
                if seen.insert(next.clone()) {
                    ways.push_back(way.iter().chain([next]).cloned().collect());
                }
            }
        }
        None
    };
    graph.keys().filter_map(back).collect()
}

/// The words before the name of an item.
const DEFINES: [&str; 10] =
    ["fn", "struct", "enum", "union", "trait", "type", "const", "static", "macro_rules", "macro"];

fn parent(file: &str) -> &str {
    file.rsplit_once('/').map_or("", |(folder, _)| folder)
}

fn is(token: Option<&TokenTree>, what: char) -> bool {
    matches!(token, Some(TokenTree::Punct(punct)) if punct.as_char() == what)
}

/// The brackets of the attribute that tokens begin with.
fn attribute(tokens: &[TokenTree]) -> Option<&Group> {
    let inner = usize::from(is(tokens.get(1), '!'));
    match (tokens.first(), tokens.get(1 + inner)) {
        (hash, Some(TokenTree::Group(group))) if is(hash, '#') && group.delimiter() == Delimiter::Bracket => {
            Some(group)
        }
        _ => None,
    }
}

/// Whether what follows an attribute is compiled for tests alone.
fn for_tests(attribute: &Group) -> bool {
    let text: String = attribute.stream().to_string().split_whitespace().collect();
    text == "cfg(test)" || text.starts_with("cfg(all(test,")
}

/// How many tokens the item takes that they begin with: up to its `;` or its body.
fn length_of_item(tokens: &[TokenTree]) -> usize {
    let imports = tokens.iter().take(4).any(|token| matches!(token, TokenTree::Ident(word) if word == "use"));
    let ends = |token: &TokenTree| match token {
        TokenTree::Group(group) => group.delimiter() == Delimiter::Brace && !imports,
        other => is(Some(other), ';'),
    };
    tokens.iter().position(ends).map_or(tokens.len(), |at| at + 1)
}

/// The names of the path that tokens begin with.
fn path(tokens: &[TokenTree]) -> Path {
    let mut names = vec![];
    let mut at = 0;
    while let Some(TokenTree::Ident(name)) = tokens.get(at) {
        names.push(name.to_string());
        if !(is(tokens.get(at + 1), ':') && is(tokens.get(at + 2), ':')) {
            break;
        }
        at += 3;
    }
    names
}
