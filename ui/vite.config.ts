import { defineConfig } from "vite";

// Built at development time into the Python package, which serves it as it is: users need no node.
export default defineConfig({
  base: "/",
  build: {
    outDir: "../kitae/ui/static",
    emptyOutDir: true,
    target: "es2022",
    modulePreload: { polyfill: false },
    assetsInlineLimit: 0,
    cssCodeSplit: false,
  },
});
