// Figures as a table on stdout while they come, and as JSON at the end.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace rates {

// A NaN is a figure that could not be had: "-" in the table, null in JSON.
struct Figure {
  char const* name;
  double value;
  int digits;
};

class Report {
 public:
  // Facts of the whole run.
  void fact(std::string const& name, std::string const& text) {
    std::printf("%s: %s\n", name.c_str(), text.c_str());
    facts_.emplace_back(name, text);
  }

  void group(char const* name, char const* title) {
    group_ = name;
    title_ = title;
  }

  void row(std::string const& name, std::vector<Figure> const& figures) {
    if (!title_.empty()) {
      std::printf("\n%s: %s\n  %-18s", group_.c_str(), title_.c_str(), "");
      for (Figure const& figure : figures) {
        std::printf(" %*s", width(figure), figure.name);
      }
      std::printf("\n");
      title_.clear();
    }
    std::printf("  %-18s", name.c_str());
    std::string json = "{\"group\": \"" + group_ + "\", \"name\": \"" + name + "\"";
    for (Figure const& figure : figures) {
      std::string const text = number(figure);
      std::printf(" %*s", width(figure), text.empty() ? "-" : text.c_str());
      json += std::string(", \"") + figure.name + "\": " + (text.empty() ? "null" : text);
    }
    std::printf("\n");
    std::fflush(stdout);
    rows_.push_back(json + "}");
  }

  bool empty() const { return rows_.empty(); }

  void write(std::string const& path) const {
    std::string json = "{\n";
    for (auto const& [name, text] : facts_) {
      json += "  \"" + name + "\": \"" + text + "\",\n";
    }
    json += "  \"figures\": [";
    for (std::size_t i = 0; i < rows_.size(); ++i) {
      json += (i == 0 ? "\n    " : ",\n    ") + rows_[i];
    }
    json += "\n  ]\n}\n";
    std::FILE* const file = std::fopen(path.c_str(), "w");
    bool written = file != nullptr && std::fputs(json.c_str(), file) >= 0;
    written = file != nullptr && std::fclose(file) == 0 && written;
    if (!written) {
      throw std::runtime_error("cannot write " + path);
    }
  }

 private:
  static int width(Figure const& figure) { return std::max(9, static_cast<int>(std::string(figure.name).size())); }

  static std::string number(Figure const& figure) {
    if (!std::isfinite(figure.value)) {
      return "";
    }
    char text[64];
    std::snprintf(text, sizeof text, "%.*f", figure.digits, figure.value);
    return text;
  }

  std::string group_;
  // Until its first row has been printed.
  std::string title_;
  std::vector<std::pair<std::string, std::string>> facts_;
  std::vector<std::string> rows_;
};

}  // namespace rates
